// The inputs of the conformance suite (docs/style.md, rule 31), by what varies.
#ifndef CERTKV_TESTS_CONFORMANCE_SHAPES_H_
#define CERTKV_TESTS_CONFORMANCE_SHAPES_H_

#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "tests/conformance/sequence_case.h"

namespace certkv::conformance {

struct NamedShape {
  std::string name;  // letters, digits and _
  SequenceShape shape;
};

inline void PrintTo(const NamedShape& shape, std::ostream* out) { *out << shape.name; }

// Of a pair of formats of the suite: "K8V4", "K6V4w1" with one witness band, ... It must be one.
SequenceShape ShapeOfFormat(absl::string_view name);

// Every pair of formats, without and with the witnesses it allows, F16 and BF16 originals.
std::vector<NamedShape> FormatShapes();
// Every head_dim and value_dim, equal and different, in a format of each kind; every pairing.
std::vector<NamedShape> DimensionShapes();
// Every Content.
std::vector<NamedShape> ContentShapes();
// Lengths around 16, 64 and the tail, ranges that begin and end inside tiles, every group size.
std::vector<NamedShape> RangeShapes();
// Soft cap, sink, logit scale, sources, misaligned rows, and all of them.
std::vector<NamedShape> OptionShapes();

// All of the above.
std::vector<NamedShape> AllShapes();
// Those of `shapes` that the backend has: CUDA has no K8D.
std::vector<NamedShape> ShapesOf(Backend backend, std::vector<NamedShape> shapes);

}  // namespace certkv::conformance

#endif  // CERTKV_TESTS_CONFORMANCE_SHAPES_H_
