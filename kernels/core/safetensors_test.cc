#include "kernels/core/safetensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kTracePath[] = "tests/data/smollm2-135m-4-layers.safetensors";

std::string LengthOf(uint64_t header_bytes) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &header_bytes, 8);
  return bytes;
}

std::string FileOf(absl::string_view header, size_t data_bytes) {
  return absl::StrCat(LengthOf(header.size()), header, std::string(data_bytes, 'd'));
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> ParseText(absl::string_view file) {
  // A copy of exactly the size, so that AddressSanitizer sees a read behind the end.
  static std::unique_ptr<uint8_t[]> copy;
  copy = std::make_unique<uint8_t[]>(file.size());
  std::memcpy(copy.get(), file.data(), file.size());
  return SafetensorsFile::Parse(absl::MakeConstSpan(copy.get(), file.size()));
}

std::string ReadFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(stream), {});
}

// A file under the test's temporary folder, removed at the end.
class ScratchFile {
 public:
  explicit ScratchFile(absl::string_view content)
      : path_(absl::StrCat(testing::TempDir(), "/certkv_safetensors_", getpid())) {
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~ScratchFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// One tensor entry, without the braces of the header.
std::string Entry(absl::string_view name, absl::string_view dtype, absl::string_view shape,
                  absl::string_view offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":[", shape,
                      "],\"data_offsets\":[", offsets, "]}");
}

TEST(SafetensorsTest, ReadsShapesBytesAndMetadata) {
  const std::string header =
      absl::StrCat("{\"__metadata__\":{\"about\":\"x\\u00e9\"},", Entry("b", "F16", "2,1", "4,8"),
                   ",", Entry("a", "F32", "", "0,4"), ",", Entry("empty", "I64", "0,7", "4,4"), ",",
                   Entry("last", "U8", "0", "8,8"), "}   ");
  const auto file = ParseText(absl::StrCat(LengthOf(header.size()), header, "aaaabbbb"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), 4u);
  EXPECT_EQ((*file)->metadata().at("about"), "x\u00e9");
  const auto b = (*file)->Tensor("b");
  ASSERT_TRUE(b.ok());
  EXPECT_EQ(b->dtype, TensorDtype::kF16);
  EXPECT_THAT(b->shape, ElementsAre(2, 1));
  EXPECT_THAT(b->bytes, ElementsAre('b', 'b', 'b', 'b'));
  EXPECT_EQ(b->element_count(), 2);
  EXPECT_EQ((*file)->Tensor("a")->element_count(), 1) << "no dimensions: a scalar";
  EXPECT_EQ((*file)->Tensor("empty")->element_count(), 0);
  EXPECT_THAT((*file)->Tensor("empty")->shape, ElementsAre(0, 7));
}

TEST(SafetensorsTest, FileWithoutTensorsIsValid) {
  const auto file = ParseText(FileOf("{}", 0));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE((*file)->tensors().empty());
}

TEST(SafetensorsTest, EveryDtypeHasItsSize) {
  const std::vector<std::pair<const char*, int>> dtypes = {
      {"F16", 2}, {"BF16", 2}, {"F32", 4}, {"F64", 8}, {"I8", 1},
      {"U8", 1},  {"I16", 2},  {"I32", 4}, {"I64", 8}, {"BOOL", 1}};
  for (const auto& [name, size] : dtypes) {
    const auto file = ParseText(FileOf(
        absl::StrCat("{", Entry("t", name, "3", absl::StrCat("0,", 3 * size)), "}"), 3 * size));
    ASSERT_TRUE(file.ok()) << file.status();
    const TensorDtype dtype = (*file)->Tensor("t")->dtype;
    EXPECT_STREQ(TensorDtypeName(dtype), name);
    EXPECT_EQ(TensorDtypeBytes(dtype), size);
  }
}

TEST(SafetensorsTest, UnknownTensorIsNotFound) {
  const auto file = ParseText(FileOf(absl::StrCat("{", Entry("t", "U8", "1", "0,1"), "}"), 1));
  ASSERT_TRUE(file.ok());
  const absl::Status status = (*file)->Tensor("layers.9.key").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), "TENSOR_NOT_FOUND");
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"layers.9.key\""));
}

struct BadFile {
  const char* reason;
  std::string bytes;
  const char* message;  // a part of the expected message
};

void ExpectRefused(const BadFile& bad) {
  const absl::Status status = ParseText(bad.bytes).status();
  SCOPED_TRACE(absl::StrCat(bad.reason, ": ", bad.bytes.substr(0, 200)));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), bad.reason) << status;
  EXPECT_THAT(std::string(status.message()), StartsWith("safetensors file in memory: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
}

TEST(SafetensorsTest, RefusesTruncatedFiles) {
  const std::string header = absl::StrCat("{", Entry("t", "U8", "9", "0,9"), "}");
  for (const BadFile& bad : std::vector<BadFile>{
           {"FILE_TRUNCATED", "", "the file has 0 bytes"},
           {"FILE_TRUNCATED", LengthOf(2).substr(0, 7), "the file has 7 bytes"},
           {"FILE_TRUNCATED", LengthOf(2), "needs 2 bytes, the file has 0"},
           {"FILE_TRUNCATED", LengthOf(3) + "{}", "needs 3 bytes, the file has 2"},
           {"FILE_TRUNCATED", LengthOf(kSafetensorsHeaderBytesMax) + "{}", "needs 16777216 bytes"},
           {"FILE_TRUNCATED", FileOf(header, 8), "the tensors need 9 bytes, the file has 8"},
           {"FILE_TRUNCATED", FileOf(header, 0), "the tensors need 9 bytes, the file has 0"}}) {
    ExpectRefused(bad);
  }
}

TEST(SafetensorsTest, RefusesHeadersOverTheLimit) {
  for (const uint64_t size : {uint64_t{kSafetensorsHeaderBytesMax} + 1, uint64_t{1} << 63,
                              ~uint64_t{0}, ~uint64_t{0} - 7}) {
    ExpectRefused({"HEADER_TOO_LARGE", LengthOf(size) + "{}", "limit 16777216"});
  }
}

TEST(SafetensorsTest, RefusesHeadersThatAreNotJson) {
  using std::string_literals::operator""s;
  for (const std::string& header :
       {""s, " {}"s, "[]"s, "\xef\xbb\xbf{}"s, "{"s, "{}}"s, "{} x"s, "{}\0"s, "{}\0 junk"s,
        "{\"a\":}"s, "{'a':1}"s, "{\"a\":\"\xff\"}"s, "{\"a\":1e999}"s, "{\"a\":NaN}"s, "{}//c"s,
        "{\"a\":01}"s, "{\"\n\":1}"s}) {
    ExpectRefused({"HEADER_NOT_JSON", FileOf(header, 0), "header"});
  }
}

TEST(SafetensorsTest, RefusesHeadersOfOtherForm) {
  const std::string good = Entry("t", "U8", "1", "0,1");
  for (const std::string& header : std::vector<std::string>{
           R"({"t":1})",
           R"({"t":null})",
           R"({"t":[]})",
           R"({"t":{}})",
           R"({"t":{"shape":[1],"data_offsets":[0,1]}})",
           R"({"t":{"dtype":"U8","data_offsets":[0,1]}})",
           R"({"t":{"dtype":"U8","shape":[1]}})",
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"extra":1}})",
           R"({"t":{"dtype":"U8","shape":[1],"offsets":[0,1]}})",
           R"({"t":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})",
           R"({"t":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})",
           R"({"t":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})",
           R"({"t":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})",
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0]}})",
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}})",
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,true]}})",
           R"({"t":{"dtype":"U8","shape":[1],"data_offsets":{"0":1}}})",
           R"({"t":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}})",
           absl::StrCat("{", good, ",", good, "}"),
           R"({"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
           absl::StrCat(R"({"__metadata__":{"a":"1","a":"2"},)", good, "}"),
           absl::StrCat(R"({"__metadata__":{},"__metadata__":{},)", good, "}"),
           absl::StrCat(R"({"__metadata__":[],)", good, "}"),
           absl::StrCat(R"({"__metadata__":{"a":1},)", good, "}"),
           R"({"t":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})"}) {
    ExpectRefused({"HEADER_INVALID", FileOf(header, 1), ""});
  }
}

TEST(SafetensorsTest, RefusesDeepNestingWithoutBuildingIt) {
  const std::string deep = "{\"t\":" + std::string(8 << 20, '[');
  ExpectRefused({"HEADER_INVALID", FileOf(deep, 0), "deeper than 3"});
}

TEST(SafetensorsTest, RefusesBadTensors) {
  const auto file = [](absl::string_view shape, absl::string_view offsets,
                       const char* dtype = "F16") {
    return FileOf(absl::StrCat("{", Entry("t", dtype, shape, offsets), "}"), 4);
  };
  for (const BadFile& bad : std::vector<BadFile>{
           {"DTYPE_UNKNOWN", file("4", "0,4", "Q4"), "has dtype \"Q4\""},
           {"DTYPE_UNKNOWN", file("4", "0,4", "u8"), "has dtype \"u8\""},
           {"DTYPE_UNKNOWN", file("4", "0,4", ""), "has dtype \"\""},
           {"SHAPE_INVALID", file("-2", "0,4"), "has shape [-2]"},
           {"SHAPE_INVALID", file("-1,-2", "0,4"), "has shape [-1,-2]"},
           {"SHAPE_INVALID", file("9223372036854775808", "0,4"), "[9223372036854775808]"},
           {"SHAPE_INVALID", file("4611686018427387904", "0,4"), "less than 2^63 bytes"},
           {"SHAPE_INVALID", file("4294967296,4294967296", "0,4"), "less than 2^63 bytes"},
           {"SHAPE_INVALID", file("4294967296,2147483648,2", "0,0"), "less than 2^63 bytes"},
           {"SHAPE_INVALID", file("3", "0,4"), "has 4 bytes, but its shape [3] of F16 needs 6"},
           {"SHAPE_INVALID", file("2,0", "0,4"), "needs 0"},
           {"OFFSETS_INVALID", file("2", "4,0"), "data_offsets [4,0]"},
           {"OFFSETS_INVALID", file("2", "-4,0"), "data_offsets [-4,0]"},
           {"OFFSETS_INVALID", file("2", "0,-4"), "data_offsets [0,-4]"},
           {"OFFSETS_INVALID", file("2", "9223372036854775804,9223372036854775808"), "end < 2^63"},
           {"OFFSETS_INVALID", file("2", "18446744073709551612,18446744073709551615"),
            "end < 2^63"}}) {
    ExpectRefused(bad);
  }
}

TEST(SafetensorsTest, RefusesOverlapAndGaps) {
  const auto file = [](const std::vector<std::pair<const char*, const char*>>& extents) {
    std::vector<std::string> entries;
    for (const auto& [size, offsets] : extents) {
      entries.push_back(Entry(absl::StrCat("t", entries.size()), "U8", size, offsets));
    }
    return FileOf(absl::StrCat("{", absl::StrJoin(entries, ","), "}"), 10);
  };
  ASSERT_TRUE(ParseText(file({{"6", "4,10"}, {"4", "0,4"}})).ok());
  for (const BadFile& bad : std::vector<BadFile>{
           {"OFFSETS_OVERLAP", file({{"6", "0,6"}, {"5", "5,10"}}), "begins at data byte 5"},
           {"OFFSETS_OVERLAP", file({{"10", "0,10"}, {"10", "0,10"}}), "ends at 10"},
           {"OFFSETS_OVERLAP", file({{"10", "0,10"}, {"2", "4,6"}}), "begins at data byte 4"},
           {"OFFSETS_OVERLAP", file({{"10", "0,10"}, {"0", "4,4"}}), "begins at data byte 4"},
           {"OFFSETS_GAP", file({{"9", "1,10"}}), "data bytes 0 to 1"},
           {"OFFSETS_GAP", file({{"4", "0,4"}, {"5", "5,10"}}), "data bytes 4 to 5"},
           {"OFFSETS_GAP", file({{"4", "0,4"}, {"5", "4,9"}}), "1 bytes too many"},
           {"OFFSETS_GAP", file({{"4", "0,4"}, {"4", "9223372036854775803,9223372036854775807"}}),
            "data bytes 4 to 9223372036854775803"},
           {"OFFSETS_GAP", file({}), "10 bytes too many"}}) {
    ExpectRefused(bad);
  }
}

TEST(SafetensorsTest, MessagesStayShortAndPrintableForHostileNames) {
  const std::string name = "\\u0001" + std::string(1 << 20, 'n');
  const absl::Status status =
      ParseText(FileOf(absl::StrCat("{", Entry(name, "Q4", "1", "0,1"), "}"), 1)).status();
  EXPECT_LT(status.message().size(), 400u);
  EXPECT_THAT(std::string(status.message()), HasSubstr("\\x01nnn"));
  const absl::Status not_json = ParseText(FileOf("{\"" + std::string(1 << 20, 'n'), 0)).status();
  EXPECT_LT(not_json.message().size(), 800u);
}

TEST(SafetensorsTest, OpenNamesTheFileInEveryError) {
  const auto expect = [](const std::string& path, absl::StatusCode code, const char* reason) {
    const absl::Status status = SafetensorsFile::Open(path).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(ReasonOf(status), reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("safetensors file " + path + ": "));
  };
  expect("no/such/file", absl::StatusCode::kNotFound, "FILE_NOT_FOUND");
  EXPECT_EQ(ReasonOf(SafetensorsFile::Open("tests/data").status()), "FILE_UNREADABLE");
  EXPECT_EQ(ReasonOf(SafetensorsFile::Open("/dev/null").status()), "FILE_UNREADABLE");
  const ScratchFile empty("");
  expect(empty.path(), absl::StatusCode::kInvalidArgument, "FILE_TRUNCATED");
  const ScratchFile bad(FileOf("{]", 0));
  expect(bad.path(), absl::StatusCode::kInvalidArgument, "HEADER_NOT_JSON");
}

TEST(SafetensorsTest, OpenDoesNotWaitForAWriterOfAPipe) {
  const std::string path = absl::StrCat(testing::TempDir(), "/certkv_fifo_", getpid());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(ReasonOf(SafetensorsFile::Open(path).status()), "FILE_UNREADABLE");
  unlink(path.c_str());
}

TEST(SafetensorsTest, OpenedFileReadsLikeTheParsedBytes) {
  const ScratchFile scratch(FileOf(absl::StrCat("{", Entry("t", "U8", "3", "0,3"), "}"), 3));
  const auto file = SafetensorsFile::Open(scratch.path());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT((*file)->Tensor("t")->bytes, ElementsAre('d', 'd', 'd'));
}

TEST(SafetensorsTraceTest, HasTheShapesOfItsMetadata) {
  const auto opened = SafetensorsFile::Open(kTracePath);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const SafetensorsFile& trace = **opened;
  const auto number = [&trace](const char* name) { return std::stoll(trace.metadata().at(name)); };
  EXPECT_EQ(number("kv_heads"), 3);
  EXPECT_EQ(number("query_heads"), 9);
  EXPECT_EQ(number("head_dim"), 64);
  const int64_t tokens = trace.Tensor("token_ids")->element_count();
  const int64_t queries = trace.Tensor("query_positions")->element_count();
  EXPECT_EQ(tokens, 1743);
  EXPECT_EQ(queries, 64);
  size_t layer_count = 0;
  for (const absl::string_view layer : absl::StrSplit(trace.metadata().at("layers"), ',')) {
    ++layer_count;
    for (const char* kind : {"key", "value", "query"}) {
      const auto tensor = trace.Tensor(absl::StrCat("layers.", layer, ".", kind));
      ASSERT_TRUE(tensor.ok()) << tensor.status();
      const bool is_query = absl::string_view(kind) == "query";
      EXPECT_EQ(tensor->dtype, TensorDtype::kF16);
      EXPECT_THAT(tensor->shape,
                  ElementsAre(is_query ? queries : tokens,
                              number(is_query ? "query_heads" : "kv_heads"), number("head_dim")));
      EXPECT_EQ(static_cast<int64_t>(tensor->bytes.size()), 2 * tensor->element_count());
    }
  }
  EXPECT_EQ(layer_count, 4u);
  EXPECT_EQ(trace.tensors().size(), 2 + 3 * layer_count);
}

TEST(SafetensorsTraceTest, EveryTruncationIsRefused) {
  const std::string whole = ReadFile(kTracePath);
  ASSERT_GT(whole.size(), 5000000u);
  std::vector<size_t> sizes;
  for (size_t size = 0; size < 2000; ++size) sizes.push_back(size);
  for (size_t size = 2000; size < whole.size(); size += 65537) sizes.push_back(size);
  for (size_t back = 1; back < 10; ++back) sizes.push_back(whole.size() - back);
  for (const size_t size : sizes) {
    const auto file = SafetensorsFile::Parse(
        absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(whole.data()), size));
    ASSERT_FALSE(file.ok()) << size;
    ASSERT_EQ(ReasonOf(file.status()), "FILE_TRUNCATED") << size;
  }
  EXPECT_TRUE(ParseText(whole).ok());
  EXPECT_EQ(ReasonOf(ParseText(whole + "x").status()), "OFFSETS_GAP");
}

// Reads every byte that an accepted file gives out; AddressSanitizer sees one outside.
uint64_t TouchEverything(const SafetensorsFile& file) {
  uint64_t sum = 0;
  for (const auto& [name, tensor] : file.tensors()) {
    EXPECT_EQ(static_cast<int64_t>(tensor.bytes.size()),
              tensor.element_count() * TensorDtypeBytes(tensor.dtype));
    for (const uint8_t byte : tensor.bytes) sum += byte;
  }
  return sum;
}

TEST(SafetensorsTest, MutatedHeadersAreRefusedOrReadInside) {
  constexpr uint32_t kSeed = 7;
  constexpr int kMutations = 20000;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  const std::string header =
      absl::StrCat("{\"__metadata__\":{\"a\":\"b\"},", Entry("k", "F16", "2,3", "0,12"), ",",
                   Entry("v", "U8", "4", "12,16"), ",", Entry("e", "I64", "0", "16,16"), "}");
  const std::string good = FileOf(header, 16);
  constexpr absl::string_view kBytes = "0123456789-.eE,:[]{}\"\\ \0\x80\xff";
  std::mt19937 random(kSeed);
  int refused = 0;
  for (int i = 0; i < kMutations; ++i) {
    std::string file = good;
    const int edits = 1 + static_cast<int>(random() % 3);
    for (int edit = 0; edit < edits; ++edit) {
      const size_t place = random() % (8 + header.size());
      switch (random() % 4) {
        case 0:
          file[place] = static_cast<char>(random());
          break;
        case 1:
          file[place] = kBytes[random() % kBytes.size()];
          break;
        case 2:
          file.insert(place, 1, kBytes[random() % kBytes.size()]);
          break;
        default:
          file.erase(place, 1 + random() % 4);
          break;
      }
    }
    if (i % 2 == 0) {  // reach the checks behind the header length
      file.replace(0, 8, LengthOf(file.size() < 24 ? 0 : file.size() - 24));
    }
    const auto parsed = ParseText(file);
    if (parsed.ok()) {
      TouchEverything(**parsed);
    } else {
      ++refused;
      ASSERT_FALSE(ReasonOf(parsed.status()).empty()) << parsed.status();
    }
  }
  EXPECT_GT(refused, kMutations / 2);
  EXPECT_LT(refused, kMutations) << "no mutation was accepted, so none was read";
}

}  // namespace
}  // namespace certkv
