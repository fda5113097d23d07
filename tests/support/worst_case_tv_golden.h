// The cases of tests/golden/worst_case_tv.json: masses, half-widths, TV* by enumeration of all
// sets, and what an implementation with 6 heavy tokens and a gap of 2^-12 may return at most.
#ifndef CERTKV_TESTS_SUPPORT_WORST_CASE_TV_GOLDEN_H_
#define CERTKV_TESTS_SUPPORT_WORST_CASE_TV_GOLDEN_H_

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace certkv {

struct TvGoldenCase {
  std::string kind;
  std::vector<double> mass;
  std::vector<double> half_width;
  double exact = 0;
  double upper = 0;
  double fractional = 0;  // the same for the relaxation alone
};

// All cases of the file; empty when it cannot be read, which the test must treat as a failure.
inline std::vector<TvGoldenCase> LoadTvGoldenCases(const std::string& path) {
  std::ifstream file(path);
  const nlohmann::json document = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  std::vector<TvGoldenCase> cases;
  if (document.is_discarded()) return cases;
  for (const nlohmann::json& entry : document["cases"]) {
    TvGoldenCase golden;
    golden.kind = entry["kind"].get<std::string>();
    golden.mass = entry["mass"].get<std::vector<double>>();
    golden.half_width = entry["half_width"].get<std::vector<double>>();
    golden.exact = entry["exact"].get<double>();
    golden.upper = entry["upper"].get<double>();
    golden.fractional = entry["fractional"].get<double>();
    cases.push_back(golden);
  }
  return cases;
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_WORST_CASE_TV_GOLDEN_H_
