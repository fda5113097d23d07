#include "tests/tidy/exception_list.h"

#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"

namespace certkv::tidy {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

SourceFile FileOfLines(int line_count) {
  std::string text;
  for (int i = 0; i < line_count; ++i) absl::StrAppend(&text, "int a", i, ";\n");
  return MakeSourceFile("kernels/core/a.cc", text);
}

// A function of exactly `line_count` lines.
SourceFile FunctionOfLines(int line_count) {
  std::string text = "void F() {\n";
  for (int i = 0; i < line_count - 2; ++i) absl::StrAppend(&text, "  G();\n");
  return MakeSourceFile("kernels/core/a.cc", absl::StrCat(text, "}\n"));
}

std::string Check(const std::string& exceptions, const SourceFile& file) {
  const auto list = ParseExceptionList(MakeSourceFile("exceptions.txt", exceptions));
  EXPECT_TRUE(list.ok()) << list.status();
  return FormatFindings(CheckLengths(*list, {file}));
}

TEST(ExceptionListTest, FileOverTheLimitIsFound) {
  EXPECT_THAT(Check("", FileOfLines(kFileLinesMax)), IsEmpty());
  EXPECT_THAT(Check("", FileOfLines(kFileLinesMax + 1)),
              HasSubstr("kernels/core/a.cc:0: the file has 500 lines, at most 499 are allowed"));
}

TEST(ExceptionListTest, FunctionOverTheLimitIsFound) {
  EXPECT_THAT(Check("", FunctionOfLines(kFunctionLinesMax)), IsEmpty());
  EXPECT_THAT(Check("", FunctionOfLines(kFunctionLinesMax + 1)),
              HasSubstr("kernels/core/a.cc:1: function F has 70 lines, at most 69 are allowed"));
}

TEST(ExceptionListTest, ExceptionHoldsExactlyItsLines) {
  const SourceFile file = FunctionOfLines(80);
  EXPECT_THAT(Check("function kernels/core/a.cc F 80\n", file), IsEmpty());
  EXPECT_THAT(Check("function kernels/core/a.cc F 79\n", file), HasSubstr("make it shorter"));
  EXPECT_THAT(Check("function kernels/core/a.cc F 81\n", file), HasSubstr("lower the number"));
  EXPECT_THAT(Check("file kernels/core/a.cc 600\n", FileOfLines(600)), IsEmpty());
}

TEST(ExceptionListTest, ExceptionThatIsNotNeededIsFound) {
  EXPECT_THAT(Check("file kernels/core/a.cc 10\n", FileOfLines(10)), HasSubstr("is not needed"));
}

TEST(ExceptionListTest, RefusesALineItCannotRead) {
  for (const char* line : {"file kernels/core/a.cc", "folder a 3", "file a many",
                           "file a 600\nfile a 600", "function a 600"}) {
    EXPECT_EQ(ParseExceptionList(MakeSourceFile("exceptions.txt", line)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << line;
  }
}

}  // namespace
}  // namespace certkv::tidy
