#include "tests/system/run_cli.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/system/cluster.h"

namespace certkv {

RunResult RunCli(const std::string& arguments, const std::string& program) {
  const std::string errors_path =
      absl::StrCat(::testing::TempDir(), "/certkv-cli-", getpid(), ".err");
  FILE* pipe = popen(
      absl::StrCat(BinaryDirectory(), "/", program, " ", arguments, " 2>", errors_path).c_str(),
      "r");
  RunResult result{-1, "", ""};
  std::array<char, 4096> buffer;
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) {
    result.output.append(buffer.data(), count);
  }
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  std::ifstream errors(errors_path);
  result.errors.assign(std::istreambuf_iterator<char>(errors), {});
  std::filesystem::remove(errors_path);
  return result;
}

}  // namespace certkv
