// Shell completion, made from the command line's own description, so that it can't go stale.
#ifndef CERTKV_CLIENTS_CLI_COMPLETION_H_
#define CERTKV_CLIENTS_CLI_COMPLETION_H_

#include <CLI/App.hpp>
#include <string>

namespace certkv::cli {

// A bash script (zsh loads it after `autoload -U bashcompinit; bashcompinit`).
std::string BashCompletion(const CLI::App& app);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_COMPLETION_H_
