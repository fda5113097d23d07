// Benchmarks of what surrounds a read: the finishing step and sealing.
#ifndef CERTKV_BENCH_KERNELS_STEP_BENCH_H_
#define CERTKV_BENCH_KERNELS_STEP_BENCH_H_

#include <cstdint>

#include "bench/kernels/attend_variants.h"
#include "nlohmann/json.hpp"

namespace certkv::bench {

// Rows "finish/...": microseconds per query of FinishCertificate over `atom_count` atoms like those
// of the variant's last read, for tolerances 0 and 0.2.
void AddFinishRows(const Variant& variant, int32_t atom_count, nlohmann::json* rows);

// Rows "seal/...": QuantizeTile, checksums included, of originals that lie in memory, beyond the
// caches; gigabytes of 16-bit input per second of one core.
void AddSealRows(int32_t dim, int rounds, nlohmann::json* rows);

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_KERNELS_STEP_BENCH_H_
