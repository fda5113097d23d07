#include "tests/tidy/function_length.h"

#include <gmock/gmock.h>

namespace certkv::tidy {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;

std::vector<FunctionLength> List(const std::string& text) {
  return ListFunctions(MakeSourceFile("kernels/core/a.cc", text));
}

auto Is(const std::string& name, int line, int line_count) {
  return AllOf(Field("name", &FunctionLength::name, name),
               Field("line", &FunctionLength::line, line),
               Field("line_count", &FunctionLength::line_count, line_count));
}

TEST(FunctionLengthTest, CountsFromTheDeclarationToTheClosingBrace) {
  EXPECT_THAT(List("namespace certkv {\n"
                   "\n"
                   "absl::Status Store::Seal(int a,\n"
                   "                         int b) {\n"
                   "  if (a) {\n"
                   "    b();\n"
                   "  }\n"
                   "  return c({1, 2});\n"
                   "}\n"
                   "int F() { return 1; }\n"
                   "}  // namespace certkv\n"),
              ElementsAre(Is("Store::Seal", 3, 7), Is("F", 10, 1)));
}

TEST(FunctionLengthTest, CountsMethodsInClassesAndLambdasWithTheirFunction) {
  EXPECT_THAT(List("class Store : public Base {\n"
                   " public:\n"
                   "  void Run() {\n"
                   "    Each([](int x) {\n"
                   "      Use(x);\n"
                   "    });\n"
                   "  }\n"
                   " private:\n"
                   "  int a_ = F(1);\n"
                   "  std::vector<int> list_{1, 2};\n"
                   "};\n"),
              ElementsAre(Is("Run", 3, 5)));
}

TEST(FunctionLengthTest, GoesThroughBracesOfMembersAndDefaultArguments) {
  EXPECT_THAT(List("Store::Store(int a)\n"
                   "    : a_{a},\n"
                   "      b_{a} {\n"
                   "  F();\n"
                   "}\n"
                   "void G(Options options = {}) {\n"
                   "  F();\n"
                   "}\n"),
              ElementsAre(Is("Store::Store", 1, 5), Is("G", 6, 3)));
}

TEST(FunctionLengthTest, NamesTestsByBothArguments) {
  EXPECT_THAT(List("TEST_F(StoreTest,\n"
                   "       SealsOnce) {\n"
                   "}\n"),
              ElementsAre(Is("TEST_F:StoreTest.SealsOnce", 1, 3)));
}

TEST(FunctionLengthTest, IgnoresTypesTablesMacrosAndDeclarations) {
  EXPECT_THAT(List("enum class Kind { kA, kB };\n"
                   "constexpr int kTable[] = {1, 2};\n"
                   "#define M(a) do { \\\n"
                   "  } while (0)\n"
                   "int F(int a);\n"
                   "struct A {\n"
                   "  int b = 0;\n"
                   "};\n"),
              IsEmpty());
}

}  // namespace
}  // namespace certkv::tidy
