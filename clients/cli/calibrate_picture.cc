// The picture of `certkv calibrate`: on the left each candidate in every layer, and the proposal,
// by capacity and coverage; on the right each layer's format, as a bar of its bytes, and coverage.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "clients/cli/calibrate_report.h"

namespace certkv::cli {
namespace {

constexpr double kTop = 46;
constexpr double kHeight = 260;  // of both plots
constexpr double kLeft = 60;
constexpr double kPlotWidth = 380;
constexpr double kBarsLeft = kLeft + kPlotWidth + 90;
constexpr double kBarStep = 22;
constexpr double kBottom = 130;  // room for the names of formats
constexpr double kLabelWidth = 62;
constexpr double kLabelHeight = 17;
constexpr const char* kColours[] = {"#1f77b4", "#ff7f0e", "#2ca02c", "#d62728",
                                    "#9467bd", "#8c564b", "#e377c2", "#17becf"};
constexpr char kUnused[] = "#aaa";

// Of each candidate: those that layers take have colours, in order of the layers.
std::vector<const char*> ColoursOf(const Calibration& calibration) {
  std::vector<const char*> colours(calibration.candidates.size(), kUnused);
  size_t used = 0;
  for (const LayerChoice& layer : calibration.layers) {
    const char*& colour = colours[layer.candidate];
    if (colour == kUnused) colour = kColours[used++ % std::size(kColours)];
  }
  return colours;
}

std::string Text(double x, double y, const std::string& words, const char* anchor = "middle",
                 const char* more = "") {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n", x, y,
                         anchor, more, words);
}

std::string Line(double x1, double y1, double x2, double y2, const char* colour) {
  return absl::StrFormat("<path d=\"M%.1f %.1fL%.1f %.1f\" stroke=\"%s\"/>\n", x1, y1, x2, y2,
                         colour);
}

double YOfCoverage(double coverage) { return kTop + kHeight * (1 - coverage); }

// Grid and labels of coverage, from x1 to x2.
std::string CoverageAxis(double x1, double x2) {
  std::string out;
  for (int percent = 0; percent <= 100; percent += 20) {
    const double y = YOfCoverage(percent / 100.0);
    absl::StrAppend(&out, Line(x1, y, x2, y, "#ddd"),
                    Text(x1 - 6, y + 4, absl::StrCat(percent, " %"), "end"));
  }
  return out;
}

std::string DrawCandidates(const Calibration& calibration) {
  const double original = calibration.original_bytes_per_token;
  double largest = original / calibration.bytes_per_token;
  for (const UniformFigures& one : calibration.uniform) {
    largest = std::max(largest, original / one.bytes_per_token);
  }
  const double end = std::ceil(2 * largest) / 2;  // of the axis, which begins at 1
  const auto x_of = [&](double bytes) {
    return kLeft + kPlotWidth * (original / bytes - 1) / std::max(end - 1, 0.5);
  };
  std::string out = CoverageAxis(kLeft, kLeft + kPlotWidth);
  for (double capacity = 1; capacity <= end; capacity += 0.5) {
    absl::StrAppend(&out, Text(x_of(original / capacity), kTop + kHeight + 18,
                               absl::StrFormat("%gx", capacity)));
  }
  absl::StrAppend(
      &out, Text(kLeft + kPlotWidth / 2, kTop + kHeight + 38, "capacity against 16 bits"),
      Text(kLeft, kTop - 26, "reads covered, held out; dots: one format in every layer", "start"));
  const std::vector<const char*> colours = ColoursOf(calibration);
  std::vector<std::pair<double, double>> labelled;
  for (size_t i = 0; i < calibration.candidates.size(); ++i) {
    const UniformFigures& one = calibration.uniform[i];
    const double x = x_of(one.bytes_per_token);
    const double y = YOfCoverage(one.held_out_coverage);
    absl::StrAppend(&out, absl::StrFormat("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"/>\n",
                                          x, y, colours[i]));
    // Points that lie close share the first one's label; the table names all.
    const bool is_free = std::none_of(labelled.begin(), labelled.end(), [&](const auto& other) {
      return std::fabs(other.first - x) < kLabelWidth && std::fabs(other.second - y) < kLabelHeight;
    });
    if (!is_free) continue;
    labelled.emplace_back(x, y);
    absl::StrAppend(&out, Text(x, y - 7, calibration.candidates[i].name));
  }
  const double x = x_of(calibration.bytes_per_token);
  const double y = YOfCoverage(calibration.held_out_coverage);
  absl::StrAppend(&out, absl::StrFormat("<path d=\"M%.1f %.1fl6 6l-6 6l-6-6z\"/>\n", x, y - 6),
                  Text(x - 9, y + 4, "each its own", "end", " font-weight=\"bold\""));
  return out;
}

std::string DrawLayers(const Calibration& calibration) {
  const double width = kBarStep * static_cast<double>(calibration.layers.size());
  std::string out = CoverageAxis(kBarsLeft, kBarsLeft + width);
  absl::StrAppend(
      &out, Text(kBarsLeft, kTop - 26,
                 "each layer: bar, bytes against 16 bits; circle, covered, held out", "start"));
  const double wanted = YOfCoverage(calibration.terms.coverage);
  absl::StrAppend(&out, Line(kBarsLeft, wanted, kBarsLeft + width, wanted, "#d62728"),
                  Text(kBarsLeft + width + 4, wanted + 4, "wanted", "start"));
  const std::vector<const char*> colours = ColoursOf(calibration);
  for (size_t i = 0; i < calibration.layers.size(); ++i) {
    const LayerChoice& layer = calibration.layers[i];
    const double x = kBarsLeft + kBarStep * static_cast<double>(i);
    const double top = YOfCoverage(layer.bytes_per_token / calibration.original_bytes_per_token);
    absl::StrAppend(
        &out,
        absl::StrFormat("<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\" "
                        "fill-opacity=\"0.6\"/>\n",
                        x + 3, top, kBarStep - 6, kTop + kHeight - top, colours[layer.candidate]),
        absl::StrFormat("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"none\" stroke=\"#000\" "
                        "stroke-width=\"1.5\"/>\n",
                        x + kBarStep / 2, YOfCoverage(layer.held_out_coverage)),
        Text(x + kBarStep / 2, kTop + kHeight + 14, absl::StrCat(calibration.layer_numbers[i])),
        absl::StrFormat("<g transform=\"translate(%.1f %.1f) rotate(60)\">", x + kBarStep / 2 - 3,
                        kTop + kHeight + 26),
        Text(0, 0,
             absl::StrFormat("%s, tv %.2f", calibration.candidates[layer.candidate].name,
                             layer.tv_tolerance),
             "start"),
        "</g>\n");
  }
  return out;
}

}  // namespace

std::string DrawCalibration(const Calibration& calibration) {
  const double width =
      kBarsLeft + std::max(kBarStep * static_cast<double>(calibration.layers.size()), 300.0) + 80;
  const double height = kTop + kHeight + kBottom;
  return absl::StrCat(
      absl::StrFormat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
                      "font-family=\"DejaVu Sans, sans-serif\" font-size=\"11\">\n"
                      "<rect width=\"%.0f\" height=\"%.0f\" fill=\"white\"/>\n",
                      width, height, width, height),
      DrawCandidates(calibration), DrawLayers(calibration), "</svg>\n");
}

}  // namespace certkv::cli
