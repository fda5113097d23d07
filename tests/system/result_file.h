// Figures that a system test measures, for bench/results.
#ifndef CERTKV_TESTS_SYSTEM_RESULT_FILE_H_
#define CERTKV_TESTS_SYSTEM_RESULT_FILE_H_

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

namespace certkv {

// Adds a row to those of this process, and writes all to the file that CERTKV_RESULT_FILE names, if
// it names one, with the machine's processors and load.
inline void AddResult(const nlohmann::json& row) {
  static auto* const kRows = new nlohmann::json(nlohmann::json::array());
  kRows->push_back(row);
  const char* const path = std::getenv("CERTKV_RESULT_FILE");
  if (path == nullptr) return;
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  const nlohmann::json report = {
      {"run", {{"cpu_count", std::thread::hardware_concurrency()}, {"load_average", load}}},
      {"rows", *kRows}};
  std::ofstream(path) << report.dump(2) << "\n";
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_RESULT_FILE_H_
