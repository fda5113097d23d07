#include "kernels/core/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/core/check.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;         // the header length in front of the header
constexpr size_t kContainerDepthMax = 3;    // root, tensor, shape
constexpr size_t kQuotedNameBytesMax = 64;  // of a foreign name in a message
constexpr char kMetadataName[] = "__metadata__";

struct DtypeInfo {
  TensorDtype dtype;
  const char* name;
  int64_t size_bytes;
};
constexpr DtypeInfo kDtypes[] = {{TensorDtype::kF16, "F16", 2}, {TensorDtype::kBf16, "BF16", 2},
                                 {TensorDtype::kF32, "F32", 4}, {TensorDtype::kF64, "F64", 8},
                                 {TensorDtype::kI8, "I8", 1},   {TensorDtype::kU8, "U8", 1},
                                 {TensorDtype::kI16, "I16", 2}, {TensorDtype::kI32, "I32", 4},
                                 {TensorDtype::kI64, "I64", 8}, {TensorDtype::kBool, "BOOL", 1}};

template <typename... Args>
absl::Status Invalid(absl::string_view reason, const Args&... args) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, absl::StrCat(args...));
}

// A name from the file, short and printable.
std::string Quote(absl::string_view name) {
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, kQuotedNameBytesMax)),
                      name.size() > kQuotedNameBytesMax ? "...\"" : "\"");
}

// Reads the header once without building it, so that hostile nesting costs no memory, and finds
// what a parsed Json no longer shows: an object that has a name twice.
class HeaderScanner final : public nlohmann::json_sax<Json> {
 public:
  const absl::Status& status() const { return status_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return Enter(); }
  bool start_array(size_t) override { return Enter(); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }
  bool key(string_t& name) override {
    if (names_.back().insert(name).second) return true;
    status_ = Invalid("HEADER_INVALID", "the header has the name ", Quote(name),
                      " twice in one object; names must be unique");
    return false;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    status_ = Invalid("HEADER_NOT_JSON", "the header isn't JSON at byte ", position,
                      " of it: ", absl::CHexEscape(absl::string_view(error.what()).substr(0, 256)));
    return false;
  }

 private:
  bool Enter() {
    names_.emplace_back();
    if (names_.size() <= kContainerDepthMax) return true;
    status_ = Invalid("HEADER_INVALID", "the header nests objects and arrays deeper than ",
                      kContainerDepthMax, ", the most that tensors and metadata need");
    return false;
  }
  bool Leave() {
    names_.pop_back();
    return true;
  }

  absl::Status status_;
  std::vector<std::set<std::string>> names_;  // of each open container
};

absl::StatusOr<Json> ParseHeader(absl::string_view text) {
  // The parser takes a NUL for the end of its input and skips a byte order mark.
  if (!absl::StartsWith(text, "{") || absl::StrContains(text, '\0')) {
    return Invalid("HEADER_NOT_JSON",
                   "the header must begin with '{' and hold no NUL byte; its first bytes are ",
                   Quote(text.substr(0, 8)), "; is this a safetensors file?");
  }
  HeaderScanner scanner;
  Json::sax_parse(text.begin(), text.end(), &scanner);
  CERTKV_RETURN_IF_ERROR(scanner.status());
  Json header = Json::parse(text.begin(), text.end(), /*cb=*/nullptr, /*allow_exceptions=*/false);
  CERTKV_CHECK(header.is_object(), "the scanner has accepted this text");
  return header;
}

// One tensor as the header tells it; begin and end count from the first byte after the header.
struct Entry {
  std::string name;
  TensorDtype dtype;
  std::vector<int64_t> shape;
  int64_t begin;
  int64_t end;
};

std::optional<int64_t> NonNegative(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<uint64_t>();
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return static_cast<int64_t>(number);
}

bool IsIntegerArray(const Json& value) {
  return value.is_array() && std::all_of(value.begin(), value.end(), [](const Json& element) {
           return element.is_number_integer();
         });
}

// Bytes of a tensor; nothing when a dimension is negative or a product overflows.
std::optional<int64_t> ReadShape(const Json& json, TensorDtype dtype, std::vector<int64_t>* shape) {
  int64_t bytes = TensorDtypeBytes(dtype);
  for (const Json& element : json) {
    const std::optional<int64_t> dim = NonNegative(element);
    if (!dim.has_value() || __builtin_mul_overflow(bytes, *dim, &bytes)) return std::nullopt;
    shape->push_back(*dim);
  }
  return bytes;
}

absl::StatusOr<Entry> ReadEntry(const std::string& name, const Json& info) {
  const std::string tensor = absl::StrCat("tensor ", Quote(name));
  if (!info.is_object() || info.size() != 3 || !info.contains("dtype") || !info.contains("shape") ||
      !info.contains("data_offsets")) {
    return Invalid("HEADER_INVALID", tensor,
                   " must be an object of exactly dtype, shape and data_offsets");
  }
  const Json& dtype = info["dtype"];
  const Json& shape = info["shape"];
  const Json& offsets = info["data_offsets"];
  if (!dtype.is_string() || !IsIntegerArray(shape) || !IsIntegerArray(offsets) ||
      offsets.size() != 2) {
    return Invalid("HEADER_INVALID", tensor,
                   " must have a string as dtype, integers as shape and two integers as "
                   "data_offsets");
  }
  Entry entry{.name = name, .dtype = {}, .shape = {}, .begin = 0, .end = 0};
  const auto& dtype_name = dtype.get_ref<const std::string&>();
  const auto* known = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                   [&](const DtypeInfo& one) { return one.name == dtype_name; });
  if (known == std::end(kDtypes)) {
    return Invalid("DTYPE_UNKNOWN", tensor, " has dtype ", Quote(dtype_name),
                   ", must be F16, BF16, F32, F64, I8, U8, I16, I32, I64 or BOOL");
  }
  entry.dtype = known->dtype;
  const std::optional<int64_t> bytes = ReadShape(shape, entry.dtype, &entry.shape);
  if (!bytes.has_value()) {
    return Invalid("SHAPE_INVALID", tensor, " has shape ", shape.dump().substr(0, 128),
                   ", must have dimensions >= 0 and less than 2^63 bytes");
  }
  const std::optional<int64_t> begin = NonNegative(offsets[0]);
  const std::optional<int64_t> end = NonNegative(offsets[1]);
  if (!begin.has_value() || !end.has_value() || *begin > *end) {
    return Invalid("OFFSETS_INVALID", tensor, " has data_offsets ", offsets.dump(),
                   ", must be 0 <= begin <= end < 2^63 bytes");
  }
  if (*end - *begin != *bytes) {
    return Invalid("SHAPE_INVALID", tensor, " has ", *end - *begin, " bytes, but its shape [",
                   absl::StrJoin(entry.shape, ", "), "] of ", dtype_name, " needs ", *bytes);
  }
  entry.begin = *begin;
  entry.end = *end;
  return entry;
}

// Sorts `entries` by place and checks that they fill [0, data_bytes) one behind the other.
absl::Status CheckPlaces(int64_t data_bytes, std::vector<Entry>* entries) {
  std::sort(entries->begin(), entries->end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  int64_t filled = 0;
  for (const Entry& entry : *entries) {
    if (entry.begin < filled) {
      return Invalid("OFFSETS_OVERLAP", "tensor ", Quote(entry.name), " begins at data byte ",
                     entry.begin, ", inside the tensor before it, which ends at ", filled);
    }
    if (entry.begin > filled) {
      return Invalid("OFFSETS_GAP", "data bytes ", filled, " to ", entry.begin,
                     " belong to no tensor; the next is ", Quote(entry.name));
    }
    filled = entry.end;
  }
  if (filled > data_bytes) {
    return Invalid("FILE_TRUNCATED", "the tensors need ", filled, " bytes, the file has ",
                   data_bytes, " after its header; copy or download it again");
  }
  if (filled < data_bytes) {
    return Invalid("OFFSETS_GAP", "data bytes ", filled, " to ", data_bytes,
                   " belong to no tensor; the file has ", data_bytes - filled, " bytes too many");
  }
  return absl::OkStatus();
}

absl::StatusOr<absl::string_view> HeaderText(absl::string_view file) {
  const auto file_bytes = static_cast<int64_t>(file.size());
  if (file_bytes < kLengthBytes) {
    return Invalid("FILE_TRUNCATED", "the file has ", file_bytes,
                   " bytes, a header length alone has 8; copy or download it again");
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));  // little-endian, as all of us
  if (header_bytes > static_cast<uint64_t>(kSafetensorsHeaderBytesMax)) {
    return Invalid("HEADER_TOO_LARGE", "the header length is ", header_bytes, " bytes, limit ",
                   kSafetensorsHeaderBytesMax, "; is this a safetensors file?");
  }
  if (header_bytes > static_cast<uint64_t>(file_bytes - kLengthBytes)) {
    return Invalid("FILE_TRUNCATED", "the header needs ", header_bytes, " bytes, the file has ",
                   file_bytes - kLengthBytes, " after the length; copy or download it again");
  }
  return file.substr(kLengthBytes, header_bytes);
}

absl::Status ReadMetadata(const Json& json, std::map<std::string, std::string, std::less<>>* out) {
  if (!json.is_object()) return Invalid("HEADER_INVALID", kMetadataName, " must be an object");
  for (const auto& [name, value] : json.items()) {
    if (!value.is_string()) {
      return Invalid("HEADER_INVALID", kMetadataName, " ", Quote(name), " must be a string");
    }
    out->emplace(name, value.get_ref<const std::string&>());
  }
  return absl::OkStatus();
}

}  // namespace

const char* TensorDtypeName(TensorDtype dtype) {
  for (const DtypeInfo& info : kDtypes) {
    if (info.dtype == dtype) return info.name;
  }
  return "?";
}

int64_t TensorDtypeBytes(TensorDtype dtype) {
  for (const DtypeInfo& info : kDtypes) {
    if (info.dtype == dtype) return info.size_bytes;
  }
  return 0;
}

int64_t TensorView::element_count() const {
  return static_cast<int64_t>(bytes.size()) / TensorDtypeBytes(dtype);
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(absl::string_view path) {
  const std::string name(path);
  const auto system_error = [&name](absl::string_view action, int error) {
    return MakeError(absl::ErrnoToStatusCode(error),
                     error == ENOENT ? "FILE_NOT_FOUND" : "FILE_UNREADABLE",
                     absl::StrCat("can't ", action, " safetensors file ", name, ": ",
                                  std::strerror(error), "; give the path of a readable file"));
  };
  const int descriptor = open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return system_error("open", errno);
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  struct stat status = {};
  int error = fstat(descriptor, &status) == 0 ? 0 : errno;
  if (error == 0 && !S_ISREG(status.st_mode)) error = S_ISDIR(status.st_mode) ? EISDIR : ENODEV;
  const auto file_bytes = static_cast<size_t>(status.st_size);
  if (error == 0 && file_bytes > 0) {  // mmap refuses 0 bytes
    void* mapping = mmap(nullptr, file_bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (mapping == MAP_FAILED) {
      error = errno;
    } else {
      file->mapping_ = mapping;
      file->mapping_bytes_ = file_bytes;
    }
  }
  close(descriptor);
  if (error != 0) return system_error("map", error);
  CERTKV_RETURN_IF_ERROR(file->Load(
      path, absl::MakeConstSpan(static_cast<const uint8_t*>(file->mapping_), file_bytes)));
  return file;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Parse(
    absl::Span<const uint8_t> bytes) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  CERTKV_RETURN_IF_ERROR(file->Load("in memory", bytes));
  return file;
}

absl::Status SafetensorsFile::Load(absl::string_view path, absl::Span<const uint8_t> bytes) {
  const auto load = [&]() -> absl::Status {
    const absl::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    CERTKV_ASSIGN_OR_RETURN(const absl::string_view text, HeaderText(all));
    CERTKV_ASSIGN_OR_RETURN(const Json header, ParseHeader(text));
    std::vector<Entry> entries;
    for (const auto& [name, info] : header.items()) {
      if (name == kMetadataName) {
        CERTKV_RETURN_IF_ERROR(ReadMetadata(info, &metadata_));
      } else {
        CERTKV_ASSIGN_OR_RETURN(Entry entry, ReadEntry(name, info));
        entries.push_back(std::move(entry));
      }
    }
    const absl::Span<const uint8_t> data = bytes.subspan(kLengthBytes + text.size());
    CERTKV_RETURN_IF_ERROR(CheckPlaces(static_cast<int64_t>(data.size()), &entries));
    for (Entry& entry : entries) {
      tensors_.emplace(std::move(entry.name),
                       TensorView{entry.dtype, std::move(entry.shape),
                                  data.subspan(entry.begin, entry.end - entry.begin)});
    }
    return absl::OkStatus();
  };
  return WithContext(load(), absl::StrCat("safetensors file ", path));
}

SafetensorsFile::~SafetensorsFile() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

absl::StatusOr<TensorView> SafetensorsFile::Tensor(absl::string_view name) const {
  const auto it = tensors_.find(std::string(name));
  if (it != tensors_.end()) return it->second;
  return MakeError(
      absl::StatusCode::kNotFound, "TENSOR_NOT_FOUND",
      absl::StrCat("the safetensors file has no tensor ", Quote(name), "; it has ", tensors_.size(),
                   " tensors: ", Quote(tensors_.empty() ? "" : tensors_.begin()->first), ", ..."));
}

}  // namespace certkv
