// A pass of attention over a GPU's copy of the device tier.
#ifndef CERTKV_SERVICES_CERTIFIER_DEVICE_READ_H_
#define CERTKV_SERVICES_CERTIFIER_DEVICE_READ_H_

#include <cstdint>

#include "kernels/ops/attend.h"
#include "services/certifier/counters.h"
#include "services/certifier/read_kernels.h"
#include "services/certifier/read_plan.h"

namespace certkv::certifier {

// True: the GPU has written all of `result`. False: the host is to run the pass, and overwrites
// what may have been written; counted, with the reason, where a GPU was to run it.
//
// A GPU runs passes that read quantized tiles, all of them or beside originals; of originals alone
// the host has read every byte for its checksum and goes on with them. Before a slot's copy is read
// for the first time in its generation, it is compared with the mapped slab, whose checksums
// ReadTiles has verified by then. A device that fails is not asked again.
//
// Originals come from the mapped backing slab, in each pass anew. They are the ones that were
// sealed: ReadTiles::HoldOriginal has compared the slot's generation and the checksum before the
// pass, the device has its copies when the call returns, and ReadTiles::CheckUnchanged compares the
// generation after that, before anything is returned. So a slot that is given to another block at
// any moment between is seen, wherever its bytes were read; and nobody writes to a sealed slot.
//
// `args` are of the pass, with sources; their tiles were opened by ReadTiles, which compares the
// generations after the pass as well.
bool AttendOnDevice(const ReadPlan& plan, int32_t kv_head, const ReadKernels& kernels,
                    const AttendArgs& args, const AttendResult& result, void* workspace,
                    CertifierCounters* counters);

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_DEVICE_READ_H_
