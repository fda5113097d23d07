#include "kernels/cuda/on_cpu/sharing/injected_failures.h"

#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

namespace certkv::cuda_sharing {
namespace {

std::mutex mutex;
std::string injected;
std::string injected_path;
std::map<std::string, int>& CallCounts() {
  static std::map<std::string, int> counts;
  return counts;
}

thread_local cudaError_t last_error = cudaSuccess;

std::string Failures() {
  if (injected_path.empty()) return injected;
  std::ifstream file(injected_path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

void InjectFailures(const std::string& failures) {
  const std::lock_guard lock(mutex);
  injected = failures;
  injected_path.clear();
  CallCounts().clear();
}

void InjectFailuresFromFile(const std::string& path) {
  const std::lock_guard lock(mutex);
  injected_path = path;
  CallCounts().clear();
}

cudaError_t InjectedFailureOf(const char* function) {
  const std::lock_guard lock(mutex);
  std::istringstream words(Failures());
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const size_t at = word.find('@');
    const std::string name = word.substr(0, equals);
    if (equals == std::string::npos || (name != "*" && name != function)) continue;
    const int from = at == std::string::npos ? 1 : std::atoi(word.c_str() + at + 1);
    if (++CallCounts()[word] < from) continue;
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
