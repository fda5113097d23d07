#include "tests/tidy/source_file.h"

#include <gmock/gmock.h>

namespace certkv::tidy {
namespace {

using ::testing::ElementsAre;

TEST(SourceFileTest, BlanksCommentsAndLiteralsInPlace) {
  const SourceFile file = MakeSourceFile("kernels/core/a.cc",
                                         "int a = 1'000;  // sleep\n"
                                         "f(\"x // \\\" y\", '\"'); /* b\n"
                                         "c */ g();\n");
  EXPECT_THAT(file.code, ElementsAre("int a = 1'000;          ",  //
                                     "f(\"         \", ' ');     ", "     g();"));
}

TEST(SourceFileTest, BlanksRawLiteralsUpToTheirDelimiter) {
  const SourceFile file = MakeSourceFile("a.cc", "f(R\"x(a \" )\" b)x\"); g();\n");
  EXPECT_THAT(file.code, ElementsAre("f(R\"            \"); g();"));
}

TEST(SourceFileTest, SurvivesTextThatEndsInsideALiteral) {
  for (const char* text : {"\"abc", "R\"(abc", "R\"abc", "/* abc", "'", "\"\\"}) {
    EXPECT_EQ(MakeSourceFile("a.cc", text).code.size(), 1) << text;
  }
}

TEST(SourceFileTest, KnowsTestsHeadersAndBuildFiles) {
  EXPECT_TRUE(MakeSourceFile("kernels/core/ids_test.cc", "").IsTest());
  EXPECT_FALSE(MakeSourceFile("kernels/core/ids.cc", "").IsTest());
  EXPECT_TRUE(MakeSourceFile("kernels/core/ids.h", "").IsHeader());
  EXPECT_TRUE(MakeSourceFile("cmake/CertKv.cmake", "").IsBuild());
  EXPECT_FALSE(MakeSourceFile("docs/style.md", "").IsBuild());
}

TEST(SourceFileTest, RefusesAFolderThatIsNotTheRoot) {
  EXPECT_EQ(ReadSourceTree("tests/tidy").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace certkv::tidy
