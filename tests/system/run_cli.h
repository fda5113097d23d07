// Runs our programs as a user does.
#ifndef CERTKV_TESTS_SYSTEM_RUN_CLI_H_
#define CERTKV_TESTS_SYSTEM_RUN_CLI_H_

#include <string>

namespace certkv {

struct RunResult {
  int exit_code;
  std::string output;  // standard output
  std::string errors;  // standard error
};

// Runs `certkv <arguments>` (or another of our programs) through the shell, and waits.
RunResult RunCli(const std::string& arguments, const std::string& program = "certkv");

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_RUN_CLI_H_
