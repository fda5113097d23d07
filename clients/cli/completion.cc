#include "clients/cli/completion.h"

#include "absl/strings/str_cat.h"

namespace certkv::cli {
namespace {

// "put attend --json --socket": subcommands and long options.
std::string Words(const CLI::App& app) {
  std::string words;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    absl::StrAppend(&words, sub->get_name(), " ");
  }
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) absl::StrAppend(&words, "--", name, " ");
  }
  if (!words.empty()) words.pop_back();
  return words;
}

void AddCases(const CLI::App& app, const std::string& path, std::string& script) {
  absl::StrAppend(&script, "    \"", path, "\") words=\"", Words(app), "\" ;;\n");
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    AddCases(*sub, path.empty() ? sub->get_name() : absl::StrCat(path, " ", sub->get_name()),
             script);
  }
}

}  // namespace

std::string BashCompletion(const CLI::App& app) {
  std::string cases;
  AddCases(app, "", cases);
  return absl::StrCat(
      "# bash completion for certkv: source <(certkv completion)\n"
      "_certkv() {\n"
      "  local current=\"${COMP_WORDS[COMP_CWORD]}\" path=\"\" words=\"\" i\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    case \"${COMP_WORDS[i]}\" in\n"
      "      -*|*/*) ;;\n"
      "      *) path=\"${path:+$path }${COMP_WORDS[i]}\" ;;\n"
      "    esac\n"
      "  done\n"
      "  case \"$path\" in\n",
      cases,
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
      "  if [[ \"$current\" != -* ]]; then COMPREPLY+=($(compgen -f -- \"$current\")); fi\n"
      "}\n"
      "complete -F _certkv certkv\n");
}

}  // namespace certkv::cli
