// Until kernels/cpu is built: its functions, by the reference.
#include "kernels/cpu/cpu.h"
#include "kernels/reference/reference.h"

namespace certkv::cpu {

std::vector<CpuIsa> SupportedIsas() { return {CpuIsa::kPortable}; }
void QuantizeTile(CpuIsa /*isa*/, const QuantizeTileArgs& args) { reference::QuantizeTile(args); }
int64_t AttendWorkspaceBytes(const AttendArgs& args) {
  return reference::AttendWorkspaceBytes(args);
}
void Attend(CpuIsa /*isa*/, const AttendArgs& args, const AttendResult& result, void* workspace) {
  reference::Attend(args, result, workspace);
}

}  // namespace certkv::cpu
