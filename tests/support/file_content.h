#ifndef CERTKV_TESTS_SUPPORT_FILE_CONTENT_H_
#define CERTKV_TESTS_SUPPORT_FILE_CONTENT_H_

#include <fstream>
#include <sstream>
#include <string>

namespace certkv {

// All of a file; "" where there is none.
inline std::string ContentOf(const std::string& path) {
  std::ostringstream content;
  content << std::ifstream(path).rdbuf();
  return content.str();
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_FILE_CONTENT_H_
