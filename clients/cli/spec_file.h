// A CacheSpec in a file: JSON of certkv.type.CacheSpec, as `certkv calibrate --spec` writes it.
#ifndef CERTKV_CLIENTS_CLI_SPEC_FILE_H_
#define CERTKV_CLIENTS_CLI_SPEC_FILE_H_

#include <string>

#include "absl/status/statusor.h"
#include "clients/cli/trace.h"
#include "kernels/core/cache_spec.h"

namespace certkv::cli {

// Errors: those of ReadTextFile; InvalidArgument [CACHE_SPEC_INVALID].
absl::StatusOr<CacheSpec> ReadSpecFile(const std::string& path);

// That of `trace`, its formats from the file of a spec, or all `format_name` when `path` is "".
// Errors: as ParseFormat and ReadSpecFile; InvalidArgument [CACHE_SPEC_INVALID], of another model.
absl::StatusOr<CacheSpec> SpecOf(const Trace& trace, const std::string& format_name,
                                 const std::string& path);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_SPEC_FILE_H_
