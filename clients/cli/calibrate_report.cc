#include "clients/cli/calibrate_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "clients/cli/table.h"

namespace certkv::cli {
namespace {

using nlohmann::json;

std::string Times(double original, double quantized) {
  return absl::StrFormat("%.2fx", original / quantized);
}

// Where the layers of the file are not those of a whole model from its first on, the spec counts
// them otherwise than the model does.
bool HasAllLayers(const Calibration& calibration) {
  for (size_t i = 0; i < calibration.layer_numbers.size(); ++i) {
    if (calibration.layer_numbers[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

std::string LayerTable(const Calibration& calibration) {
  Table table;
  table.AddColumn("layer");
  table.AddColumn("format", Table::Align::kLeft);
  for (const char* title :
       {"B/token", "capacity", "tv\ntolerance", "covered,\nchoosing", "covered,\nheld out"}) {
    table.AddColumn(title);
  }
  table.AddColumn("", Table::Align::kLeft);
  for (size_t i = 0; i < calibration.layers.size(); ++i) {
    const LayerChoice& layer = calibration.layers[i];
    table.AddRow({absl::StrCat(calibration.layer_numbers[i]),
                  calibration.candidates[layer.candidate].name,
                  absl::StrFormat("%.1f", layer.bytes_per_token),
                  Times(calibration.original_bytes_per_token, layer.bytes_per_token),
                  absl::StrFormat("%.2f", layer.tv_tolerance),
                  FormatPercent(layer.choosing_coverage), FormatPercent(layer.held_out_coverage),
                  layer.reaches_coverage ? "" : "the closest of all"});
  }
  return table.Render();
}

std::string CandidateTable(const Calibration& calibration) {
  Table table;
  table.AddColumn("in every layer", Table::Align::kLeft);
  for (const char* title : {"B/token", "capacity", "covered,\nheld out"}) table.AddColumn(title);
  const auto add = [&](const std::string& name, double bytes, double covered) {
    table.AddRow({name, absl::StrFormat("%.1f", bytes),
                  Times(calibration.original_bytes_per_token, bytes), FormatPercent(covered)});
  };
  for (size_t i = 0; i < calibration.candidates.size(); ++i) {
    const UniformFigures& uniform = calibration.uniform[i];
    add(calibration.candidates[i].name, uniform.bytes_per_token, uniform.held_out_coverage);
  }
  add("each its own", calibration.bytes_per_token, calibration.held_out_coverage);
  return table.Render();
}

}  // namespace

std::string RenderCalibration(const Calibration& calibration) {
  const CalibrationTerms& terms = calibration.terms;
  std::string text = absl::StrFormat(
      "%s\nreads covered: certified at once, within tv %g and value %g; wanted of %s %s\n"
      "chosen on %s reads; expected figures are of %s others, which had no part in the choice\n\n",
      calibration.spec.model, terms.tolerances.tv_tolerance, terms.tolerances.value_tolerance,
      terms.of_model ? "all layers together" : "each layer", FormatPercent(terms.coverage),
      FormatCount(calibration.choosing_reads), FormatCount(calibration.held_out_reads));
  absl::StrAppend(&text, LayerTable(calibration), "\n", CandidateTable(calibration), "\n");
  if (!HasAllLayers(calibration)) {
    absl::StrAppend(&text,
                    "The traces have some of the model's layers, so spec and policy count only "
                    "these, from 0. For the model itself record all.\n");
  }
  return text;
}

json CalibrationJson(const Calibration& calibration) {
  const CalibrationTerms& terms = calibration.terms;
  json data = {{"model", calibration.spec.model},
               {"tv_tolerance", terms.tolerances.tv_tolerance},
               {"value_tolerance", terms.tolerances.value_tolerance},
               {"coverage", terms.coverage},
               {"coverage_of", terms.of_model ? "model" : "layer"},
               {"choosing_reads", calibration.choosing_reads},
               {"held_out_reads", calibration.held_out_reads},
               {"original_bytes_per_token", calibration.original_bytes_per_token},
               {"bytes_per_token", calibration.bytes_per_token},
               {"capacity", calibration.original_bytes_per_token / calibration.bytes_per_token},
               {"held_out_coverage", calibration.held_out_coverage},
               {"layers", json::array()},
               {"candidates", json::array()}};
  for (size_t i = 0; i < calibration.layers.size(); ++i) {
    const LayerChoice& layer = calibration.layers[i];
    data["layers"].push_back({{"layer", calibration.layer_numbers[i]},
                              {"format", calibration.candidates[layer.candidate].name},
                              {"reaches_coverage", layer.reaches_coverage},
                              {"tv_tolerance", layer.tv_tolerance},
                              {"bytes_per_token", layer.bytes_per_token},
                              {"choosing_coverage", layer.choosing_coverage},
                              {"held_out_coverage", layer.held_out_coverage}});
  }
  for (size_t i = 0; i < calibration.candidates.size(); ++i) {
    data["candidates"].push_back({{"format", calibration.candidates[i].name},
                                  {"bytes_per_token", calibration.uniform[i].bytes_per_token},
                                  {"held_out_coverage", calibration.uniform[i].held_out_coverage}});
  }
  return data;
}

gate::v1::Policy CalibratedPolicy(const Calibration& calibration, gate::v1::Policy base) {
  type::Tolerances& tolerances = *base.mutable_tolerances();
  tolerances.set_tv_tolerance(calibration.terms.tolerances.tv_tolerance);
  tolerances.set_value_tolerance(calibration.terms.tolerances.value_tolerance);
  std::vector<std::pair<float, int32_t>> tighter;  // tolerance, index of the layer
  for (size_t i = 0; i < calibration.layers.size(); ++i) {
    const float tolerance = calibration.layers[i].tv_tolerance;
    if (tolerance < calibration.terms.tolerances.tv_tolerance) {
      tighter.emplace_back(tolerance, static_cast<int32_t>(i));
    }
  }
  std::sort(tighter.begin(), tighter.end());
  tighter.resize(std::min(tighter.size(), kLayerOverridesMax));
  base.clear_overrides();
  for (const auto& [tolerance, layer] : tighter) {
    gate::v1::PolicyOverride& one = *base.add_overrides();
    one.set_model(ModelLabel(calibration.spec.model));
    one.set_layer(layer);
    one.set_tv_tolerance(tolerance);
  }
  return base;
}

std::string ModelLabel(const std::string& model) {
  const bool fits = model.size() <= 128 && std::all_of(model.begin(), model.end(), [](char c) {
                      return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '/' || c == '-';
                    });
  return fits ? model : "";
}

}  // namespace certkv::cli
