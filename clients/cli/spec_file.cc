#include "clients/cli/spec_file.h"

#include "absl/strings/str_cat.h"
#include "certkv/type/cache.pb.h"
#include "clients/cli/commands.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"

namespace certkv::cli {

absl::StatusOr<CacheSpec> ReadSpecFile(const std::string& path) {
  CERTKV_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path));
  type::CacheSpec proto;
  const auto parsed = google::protobuf::util::JsonStringToMessage(text, &proto);
  if (!parsed.ok()) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "CACHE_SPEC_INVALID",
        absl::StrCat(path, " is not JSON of certkv.type.CacheSpec: ", std::string(parsed.message()),
                     "; write it with certkv calibrate --spec"));
  }
  absl::StatusOr<CacheSpec> spec = CacheSpecFromProto(proto);
  if (!spec.ok()) return WithContext(spec.status(), path);
  return spec;
}

absl::StatusOr<CacheSpec> SpecOf(const Trace& trace, const std::string& format_name,
                                 const std::string& path) {
  CERTKV_ASSIGN_OR_RETURN(const FormatChoice format, ParseFormat(format_name));
  CacheSpec spec = trace.MakeSpec(format);
  if (path.empty()) return spec;
  CERTKV_ASSIGN_OR_RETURN(const CacheSpec read, ReadSpecFile(path));
  spec.layers = read.layers;
  if (DigestCacheSpec(spec) == DigestCacheSpec(read) && read.layer_count() == trace.layer_count()) {
    return spec;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "CACHE_SPEC_INVALID",
                   absl::StrCat(path, " is of ", DescribeCacheSpec(read), ", the trace of ",
                                DescribeCacheSpec(trace.MakeSpec(format)),
                                "; calibrate with traces of this model"));
}

}  // namespace certkv::cli
