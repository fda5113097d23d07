// Fuzzes what a reader finds in shared memory: headers and sizes of slabs, tables of generations,
// handles, and tiles. An input is a list of changes to good memory: it is refused, or a read gives
// what it gives without them. The first byte says which.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/core/check.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/slab_layout.h"
#include "services/certifier/read_engine.h"
#include "services/certifier/read_fixture.h"
#include "services/common/convert.h"
#include "tests/fuzz/fuzz_checks.h"

namespace certkv::certifier {
namespace {

// Any bytes as a slab.
void MapAny(FuzzInput input) {
  const auto kind = static_cast<SlabKind>(input.Take<uint8_t>() % 4);
  const auto size = static_cast<off_t>(input.Take<uint32_t>() % (1 << 20));
  const CacheSpec spec = SmallSpec(1, 1, 1, 64);
  std::vector<uint8_t> header(4096);
  if (kind != SlabKind{}) SlabLayout(spec, kind, 2).WriteHeader(header.data());
  while (!input.empty()) {
    const auto at = input.Take<uint16_t>();
    header[at % sizeof(SlabHeader)] ^= input.Take<uint8_t>();
  }
  const UniqueFd fd(memfd_create("fuzz", MFD_CLOEXEC));
  CERTKV_CHECK(fd.valid() && ftruncate(fd.get(), size) == 0, "a memfd is made");
  const auto written = pwrite(fd.get(), header.data(), std::min<size_t>(header.size(), size), 0);
  CERTKV_CHECK(written >= 0, "and written");
  auto mapping = Mapping::Map(fd.get(), Mapping::Access::kReadOnly);
  if (!mapping.ok()) return CheckRefusal(mapping.status());
  const auto slab =
      MappedSlab::Create(spec, kind == SlabKind{} ? SlabKind::kDevice : kind, *std::move(mapping));
  if (!slab.ok()) return CheckRefusal(slab.status());
  CERTKV_CHECK(slab->layout().slab_bytes() <= size, "a slab lies inside its memory");
  for (int32_t slot = 0; slot < slab->layout().slot_count(); ++slot) slab->Generation(slot);
}

struct Memory {
  Memory() {
    ReadKernels kernels = KernelsOf(Backend::kCpu);
    kernels.verify_every_read = true;
    engine = std::make_unique<ReadEngine>(kernels, &counters);
    clean = *Read();
  }
  absl::StatusOr<std::vector<float>> Read() {
    const ReadRequest request = fixture.Request(0, fixture.fake.data().token_count - 1);
    CERTKV_ASSIGN_OR_RETURN(const ReadPlan plan, PlanRead(*fixture.view, request, 0));
    const CacheSpec& spec = fixture.fake.spec();
    std::vector<ReadCertificate> certificates(spec.query_head_count());
    std::vector<float> outputs(int64_t{spec.query_head_count()} * spec.value_dim);
    CERTKV_RETURN_IF_ERROR(
        engine->Read(plan, &workspace, {absl::MakeSpan(certificates), absl::MakeSpan(outputs)}));
    return outputs;
  }

  ReadFixture fixture{SmallSpec(1, 1, 2, 64), 64 * 2,
                      TestLease({.tv_tolerance = 0.2f, .value_tolerance = 0.5f})};
  CertifierCounters counters;
  std::unique_ptr<ReadEngine> engine;
  ReadWorkspace workspace;
  std::vector<float> clean;
};

// Changes tiles, reads, and puts back.
void ReadChanged(Memory& memory, FuzzInput input) {
  const TileLayout layout = MakeTileLayout(memory.fixture.fake.spec(), 0);
  std::vector<std::pair<uint8_t*, uint8_t>> changes;
  while (!input.empty() && changes.size() < 64) {
    const auto block = static_cast<int32_t>(input.Take<uint8_t>() % 2);
    const int64_t at = input.Take<uint32_t>() % layout.tile_bytes();
    uint8_t* byte = at < layout.scan_bytes
                        ? memory.fixture.fake.scan(block, 0, 0, 0) + at
                        : memory.fixture.fake.detail(block, 0, 0, 0) + at - layout.scan_bytes;
    changes.emplace_back(byte, *byte);
    *byte ^= input.Take<uint8_t>();
  }
  const auto read = memory.Read();
  for (auto change = changes.rbegin(); change != changes.rend(); ++change) {
    *change->first = change->second;
  }
  CheckRefusal(read.status());
  if (!read.ok()) return;
  CERTKV_CHECK(
      std::memcmp(read->data(), memory.clean.data(), memory.clean.size() * sizeof(float)) == 0,
      "a read that succeeds gives what it gave before");
}

void Handles(const Memory& memory, FuzzInput input) {
  std::vector<BlockHandle> handles = memory.fixture.fake.blocks();
  while (!input.empty()) {
    BlockHandle& handle = handles[input.Take<uint8_t>() % handles.size()];
    SlotRef& ref = (input.Take<uint8_t>() & 1) != 0 ? handle.device : handle.backing;
    ref.slot = input.Take<int32_t>();
    ref.generation = input.Take<uint64_t>();
  }
  for (const BlockHandle& handle : handles) {
    const auto again = BlockHandleFromProto(BlockHandleToProto(handle));
    CheckRefusal(again.status());
  }
  CheckRefusal(ValidateHandles(*memory.fixture.fake.cache(), handles));
}

}  // namespace
}  // namespace certkv::certifier

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* memory = new certkv::certifier::Memory;
  certkv::FuzzInput input(data, size);
  switch (input.Take<uint8_t>() % 3) {
    case 0:
      certkv::certifier::MapAny(input);
      break;
    case 1:
      certkv::certifier::ReadChanged(*memory, input);
      break;
    default:
      certkv::certifier::Handles(*memory, input);
  }
  return 0;
}
