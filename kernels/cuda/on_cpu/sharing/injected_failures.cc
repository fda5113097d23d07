#include "kernels/cuda/on_cpu/sharing/injected_failures.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

namespace certkv::cuda_sharing {
namespace {

struct Injected {
  std::mutex mutex;
  std::string failures;
  std::string path;
  std::map<std::string, int> call_counts;
};

// Made at first use, which may come before main.
Injected& All() {
  static auto* const injected = new Injected;
  return *injected;
}

thread_local cudaError_t last_error = cudaSuccess;

std::string FailuresOf(const Injected& all) {
  if (all.path.empty()) return all.failures;
  std::ifstream file(all.path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

void InjectFailures(const std::string& failures) {
  Injected& all = All();
  const std::lock_guard lock(all.mutex);
  all.failures = failures;
  all.path.clear();
  all.call_counts.clear();
}

void InjectFailuresFromFile(const std::string& path) {
  Injected& all = All();
  const std::lock_guard lock(all.mutex);
  all.path = path;
  all.call_counts.clear();
}

cudaError_t InjectedFailureOf(const char* function) {
  Injected& all = All();
  const std::lock_guard lock(all.mutex);
  std::istringstream words(FailuresOf(all));
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const size_t at = word.find('@');
    const std::string name = word.substr(0, equals);
    if (equals == std::string::npos || (name != "*" && name != function)) continue;
    const int from = at == std::string::npos ? 1 : std::atoi(word.c_str() + at + 1);
    if (++all.call_counts[word] < from) continue;
    last_error = static_cast<cudaError_t>(std::atoi(word.c_str() + equals + 1));
    return last_error;
  }
  return cudaSuccess;
}

cudaError_t TakeLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

}  // namespace certkv::cuda_sharing
