// The checks of this folder, run on the repository itself.

#include <gmock/gmock.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/tidy/exception_list.h"
#include "tests/tidy/include_rules.h"
#include "tests/tidy/source_file.h"
#include "tests/tidy/style_rules.h"

namespace certkv::tidy {
namespace {

// Entries of tests/tidy/exceptions.txt. Lower it with the list; it is never raised.
constexpr size_t kExceptionCount = 0;

class TreeTest : public testing::Test {
 protected:
  void SetUp() override {
    auto files = ReadSourceTree(".");
    ASSERT_TRUE(files.ok()) << files.status();
    files_ = *std::move(files);
    for (const char* path : {"docs/architecture.md", "tests/tidy/exceptions.txt", "CMakeLists.txt",
                             "kernels/core/cache_spec.h", "dev", ".ci/run"}) {
      ASSERT_NE(FindFile(path), nullptr) << "the walk does not reach " << path;
    }
  }

  // Null when the tree has no such file.
  const SourceFile* FindFile(absl::string_view path) const {
    const auto file = std::find_if(files_.begin(), files_.end(),
                                   [path](const SourceFile& other) { return other.path == path; });
    return file == files_.end() ? nullptr : &*file;
  }

  std::vector<SourceFile> files_;
};

TEST_F(TreeTest, IncludesFollowTheArchitecture) {
  const auto table = ParseIncludeTable(*FindFile("docs/architecture.md"));
  ASSERT_TRUE(table.ok()) << table.status();
  std::string found;
  for (const SourceFile& file : files_) found += FormatFindings(CheckIncludes(*table, file));
  EXPECT_TRUE(found.empty()) << "\n" << found;
}

TEST_F(TreeTest, FilesFollowTheStyle) {
  std::string found;
  for (const SourceFile& file : files_) found += FormatFindings(CheckStyle(file));
  EXPECT_TRUE(found.empty()) << "\n" << found;
}

TEST_F(TreeTest, FilesAndFunctionsAreShort) {
  const auto exceptions = ParseExceptionList(*FindFile("tests/tidy/exceptions.txt"));
  ASSERT_TRUE(exceptions.ok()) << exceptions.status();
  EXPECT_EQ(exceptions->size(), kExceptionCount) << "tests/tidy/exceptions.txt may only shrink";
  const std::string found = FormatFindings(CheckLengths(*exceptions, files_));
  EXPECT_TRUE(found.empty()) << "\n" << found;
}

}  // namespace
}  // namespace certkv::tidy
