#include "tests/tidy/style_rules.h"

#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"

namespace certkv::tidy {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

using CheckFunction = std::vector<Finding> (*)(const SourceFile&);

std::string Check(CheckFunction check, absl::string_view path, absl::string_view text) {
  return FormatFindings(check(MakeSourceFile(path, text)));
}

TEST(HeaderGuardTest, AcceptsTheGuardNamedAfterThePath) {
  EXPECT_THAT(
      Check(CheckHeaderGuard, "kernels/core/ids.h",
            "// Ids.\n#ifndef CERTKV_KERNELS_CORE_IDS_H_\n#define CERTKV_KERNELS_CORE_IDS_H_"
            "\n\n#include <vector>\n\n#endif  // CERTKV_KERNELS_CORE_IDS_H_\n"),
      IsEmpty());
}

TEST(HeaderGuardTest, FindsMissingWrongAndUnclosedGuards) {
  const std::string open = "#ifndef CERTKV_A_H_\n#define CERTKV_A_H_\n";
  EXPECT_THAT(Check(CheckHeaderGuard, "a.h", ""), HasSubstr("a.h:0: the header has no guard"));
  EXPECT_THAT(Check(CheckHeaderGuard, "a.h", "#pragma once\n"), HasSubstr("no guard"));
  EXPECT_THAT(Check(CheckHeaderGuard, "b.h", absl::StrCat(open, "#endif  // CERTKV_A_H_\n")),
              HasSubstr("begin with '#ifndef CERTKV_B_H_'"));
  EXPECT_THAT(Check(CheckHeaderGuard, "a.h",
                    "#ifndef CERTKV_A_H_\n#define CERTKV_B_H_\n#endif  // CERTKV_A_H_\n"),
              HasSubstr("a.h:2: the guard is not defined"));
  EXPECT_THAT(Check(CheckHeaderGuard, "a.h", absl::StrCat(open, "#endif\n")),
              HasSubstr("does not close"));
  EXPECT_THAT(
      Check(CheckHeaderGuard, "a.h", absl::StrCat(open, "#endif  // CERTKV_A_H_\nint a;\n")),
      HasSubstr("does not close"));
}

TEST(FloatingPointTest, FindsOptionsAndPragmasThatChangeValues) {
  for (const char* text : {"add_compile_options(-ffast-math)", "set(CMAKE_CXX_FLAGS -Ofast)",
                           "-funsafe-math-optimizations", "-ffp-contract=fast"}) {
    EXPECT_THAT(Check(CheckFloatingPoint, "kernels/cpu/CMakeLists.txt", text),
                HasSubstr("lets the compiler change values"))
        << text;
  }
  EXPECT_THAT(Check(CheckFloatingPoint, "kernels/cpu/a.cc", "#pragma GCC optimize(\"O3\")"),
              HasSubstr("kernels/cpu/a.cc:1"));
  EXPECT_THAT(Check(CheckFloatingPoint, "CMakeLists.txt", "-ffp-contract=off -O2"), IsEmpty());
}

TEST(ForbiddenWordsTest, FindsSleepOutsideTheClockAndTests) {
  for (const char* call : {"absl::SleepFor(absl::Seconds(1));", "usleep(10);", "sleep (1);",
                           "std::this_thread::sleep_for(1s);", "nanosleep(&t, nullptr);"}) {
    const std::string text = absl::StrCat("void F() {\n  ", call, "\n}\n");
    EXPECT_THAT(Check(CheckForbiddenWords, "services/gate/a.cc", text), HasSubstr("a.cc:2: "))
        << call;
    EXPECT_THAT(Check(CheckForbiddenWords, "services/common/clock.cc", text), IsEmpty()) << call;
    EXPECT_THAT(Check(CheckForbiddenWords, "clients/cpp/rpc.h", text), IsEmpty()) << call;
    EXPECT_THAT(Check(CheckForbiddenWords, "services/gate/a_test.cc", text), IsEmpty()) << call;
  }
  EXPECT_THAT(Check(CheckForbiddenWords, "a.cc", "// never sleep(1)\nint sleep_count;\n"),
              IsEmpty());
}

TEST(ForbiddenWordsTest, FindsExceptionsAssertsAndCountsCalledNum) {
  EXPECT_THAT(Check(CheckForbiddenWords, "a.cc", "throw 1;"), HasSubstr("an exception is thrown"));
  EXPECT_THAT(Check(CheckForbiddenWords, "clients/python/native/status_error.cc", "throw 1;"),
              IsEmpty());
  EXPECT_THAT(Check(CheckForbiddenWords, "a.cc", "assert(a);"), HasSubstr("off in release"));
  EXPECT_THAT(Check(CheckForbiddenWords, "a.cc", "int num_blocks;"), HasSubstr("num_"));
  EXPECT_THAT(Check(CheckForbiddenWords, "a.cc", "static_assert(a);\nF(\"throw\"); enum_kind b;"),
              IsEmpty());
}

TEST(MacrosTest, FindsMacrosButTheStatusOnes) {
  EXPECT_THAT(Check(CheckMacros, "kernels/cpu/a.cc", "#define LOAD(x) x\n"),
              HasSubstr("kernels/cpu/a.cc:1: macro LOAD"));
  EXPECT_THAT(Check(CheckMacros, "kernels/cpu/a.cc", "#  define LIMIT 4\n"), HasSubstr("LIMIT"));
  EXPECT_THAT(Check(CheckMacros, "kernels/cuda/attend.cuh", "#define LOAD(x) x\n"),
              HasSubstr("macro LOAD"));
  EXPECT_THAT(Check(CheckMacros, "kernels/cuda/device.h", "#define CERTKV_SHARED(x) x\n"),
              IsEmpty());
  EXPECT_THAT(Check(CheckMacros, "a.h", "#define CERTKV_A_H_\n#define CERTKV_CHECK(a) a\n"),
              IsEmpty());
}

TEST(MachinePathsTest, FindsPathsOfOneMachineAndPrivateFolders) {
  for (const char* text :
       {"see /work/main/x", "cd /work", "\"/home/ann/a\"", "shared/design/a.md"}) {
    EXPECT_THAT(Check(CheckMachinePaths, "docs/a.md", text), HasSubstr("docs/a.md:1: ")) << text;
  }
  for (const char* text : {"~/work/certkv", "tests/work/a", "/workers/7", "shared_memory/design"}) {
    EXPECT_THAT(Check(CheckMachinePaths, "docs/a.md", text), IsEmpty()) << text;
  }
}

TEST(TodosTest, FindsOnesWithoutAnExplanation) {
  for (const char* text :
       {"// TODO", "// TODO: fix", "// TODO(ann)", "// FIXME: this leaks memory"}) {
    EXPECT_THAT(Check(CheckTodos, "kernels/core/a.cc", text), HasSubstr("a.cc:1: ")) << text;
  }
  EXPECT_THAT(Check(CheckTodos, "a.cc", "// TODO: use huge pages, once the host tier has a config"),
              IsEmpty());
}

TEST(TestsTest, FindsCommentedDisabledAndUnnamedTests) {
  constexpr char kPath[] = "kernels/core/a_test.cc";
  EXPECT_THAT(Check(CheckTests, kPath, "// TEST(ATest, Adds) {\n"), HasSubstr("commented out"));
  EXPECT_THAT(Check(CheckTests, kPath, "//TEST_F(ATest, Adds) {\n"), HasSubstr("commented out"));
  EXPECT_THAT(Check(CheckTests, kPath, "#if 0\n"), HasSubstr("out of the build"));
  EXPECT_THAT(Check(CheckTests, kPath, "TEST(ATest, DISABLED_Adds) {\n"), HasSubstr("disabled"));
  EXPECT_THAT(Check(CheckTests, kPath, "TEST(Adder, Adds) {\n"), HasSubstr("end in Test"));
  EXPECT_THAT(Check(CheckTests, kPath, "TEST_P(ATest, Works) {\n"), HasSubstr("does not say"));
  EXPECT_THAT(Check(CheckTests, kPath, "  GTEST_SKIP();\n"), HasSubstr("without a reason"));
  EXPECT_THAT(Check(CheckTests, kPath, "TEST(ATest, Adds) {\n  GTEST_SKIP() << \"no AVX\";\n"),
              IsEmpty());
  EXPECT_THAT(Check(CheckTests, kPath, "TEST(ATest, WorkspaceIsClean) {\n"), IsEmpty());
}

TEST(TestsTest, FindsTestsCommentedOutOfTheBuild) {
  EXPECT_THAT(Check(CheckTests, "tests/sim/CMakeLists.txt", "# certkv_test(sim_test)\n"),
              HasSubstr("commented out of the build"));
  EXPECT_THAT(Check(CheckTests, "tests/sim/CMakeLists.txt", "certkv_test(sim_test)\n"), IsEmpty());
}

// Every check is wired into CheckStyle: this file breaks each of them.
TEST(CheckStyleTest, RunsEveryCheck) {
  const std::string found = Check(CheckStyle, "kernels/core/a.h",
                                  "#define LIMIT 4\n"
                                  "#pragma GCC optimize(\"O3\")\n"
                                  "int num_blocks;\n"
                                  "// /work/main\n"
                                  "// TODO\n"
                                  "// TEST(ATest, Adds)\n");
  for (const char* message : {"no guard", "macro LIMIT", "change values", "num_", "one machine",
                              "TODO without", "commented out"}) {
    EXPECT_THAT(found, HasSubstr(message));
  }
}

}  // namespace
}  // namespace certkv::tidy
