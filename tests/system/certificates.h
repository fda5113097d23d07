// Certificates, tokens and an access file in a directory of their own, made by the script that
// operators use.
#ifndef CERTKV_TESTS_SYSTEM_CERTIFICATES_H_
#define CERTKV_TESTS_SYSTEM_CERTIFICATES_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"

namespace certkv {

class Certificates {
 public:
  Certificates() {
    std::string pattern = absl::StrCat(::testing::TempDir(), "certkv_tls_XXXXXX");
    directory_ = mkdtemp(pattern.data());
  }
  ~Certificates() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  Certificates(const Certificates&) = delete;
  Certificates& operator=(const Certificates&) = delete;

  // Runs the script: Make("client engine read,write a"). `days` < 0: what has expired already.
  bool Make(const std::string& arguments, int days = 90) const {
    const std::string command =
        absl::StrCat("set -f; DAYS=", days, " ", CERTKV_SOURCE_DIRECTORY,
                     "/deploy/tls/make-certificates ", directory_, " ", arguments, " 1>&2");
    return std::system(command.c_str()) == 0;
  }
  std::string Path(const std::string& name) const { return directory_ + "/" + name; }

 private:
  std::string directory_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_CERTIFICATES_H_
