// Ids and tokens that nobody can guess or meet twice.
#ifndef CERTKV_SERVICES_COMMON_RANDOM_ID_H_
#define CERTKV_SERVICES_COMMON_RANDOM_ID_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace certkv {

// `byte_count` (1 to 256) bytes from the kernel's generator. Aborts when the kernel has none to
// give, which Linux does not do after boot. Threads: safe.
std::string RandomBytes(size_t byte_count);

// A uniform 63-bit number > 0. Threads: safe.
int64_t RandomId();

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_RANDOM_ID_H_
