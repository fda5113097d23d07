#include "services/cluster/shard_map.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::cluster {
namespace {

using nlohmann::json;

constexpr size_t kNameBytesMax = 64;
constexpr size_t kTargetBytesMax = 256;
constexpr size_t kInstanceBytesMax = 64;
// A registration of another program: far above what NodeToText writes.
constexpr size_t kTextBytesMax = 4096;

absl::Status NodeInvalid(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "NODE_INVALID",
                   absl::StrCat("a node's ", what));
}

bool IsNameCharacter(char c) { return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-'; }

absl::Status CheckText(absl::string_view what, const std::string& text, size_t bytes_min,
                       size_t bytes_max) {
  const bool printable =
      std::all_of(text.begin(), text.end(), [](char c) { return absl::ascii_isgraph(c); });
  if (printable && text.size() >= bytes_min && text.size() <= bytes_max) return absl::OkStatus();
  return NodeInvalid(absl::StrCat(what, " has ", text.size(), " bytes, must have ", bytes_min,
                                  " to ", bytes_max, " printable ones without spaces"));
}

std::string TextField(const json& object, const char* name) {
  const auto field = object.find(name);
  return field != object.end() && field->is_string() ? field->get<std::string>() : "";
}

// Uniform in (0, 1), from the hash of a node and a root.
double Uniform(uint64_t hash) {
  constexpr double kStep = 0x1p-53;
  return (static_cast<double>(hash >> 11) + 0.5) * kStep;
}

}  // namespace

absl::Status CheckNode(const Node& node) {
  const bool named = !node.name.empty() && node.name.size() <= kNameBytesMax &&
                     std::all_of(node.name.begin(), node.name.end(), IsNameCharacter);
  if (!named) {
    return NodeInvalid(absl::StrCat("name has ", node.name.size(), " bytes, must be 1 to ",
                                    kNameBytesMax, " of [a-zA-Z0-9._-]"));
  }
  CERTKV_RETURN_IF_ERROR(CheckText("target", node.target, 1, kTargetBytesMax));
  CERTKV_RETURN_IF_ERROR(CheckText("bulk_target", node.bulk_target, 0, kTargetBytesMax));
  CERTKV_RETURN_IF_ERROR(CheckText("instance", node.instance, 1, kInstanceBytesMax));
  if (node.weight >= 1 && node.weight <= kNodeWeightMax) return absl::OkStatus();
  return NodeInvalid(
      absl::StrCat("weight is ", node.weight, ", must be in [1, ", kNodeWeightMax, "]"));
}

std::string NodeToText(const Node& node) {
  return json{{"name", node.name},
              {"target", node.target},
              {"bulk_target", node.bulk_target},
              {"weight", node.weight},
              {"instance", node.instance}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<Node> NodeFromText(absl::string_view text) {
  if (text.size() > kTextBytesMax) {
    return NodeInvalid(
        absl::StrCat("registration has ", text.size(), " bytes, limit ", kTextBytesMax));
  }
  const json object = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return NodeInvalid("registration is not a JSON object");
  Node node;
  node.name = TextField(object, "name");
  node.target = TextField(object, "target");
  node.bulk_target = TextField(object, "bulk_target");
  node.instance = TextField(object, "instance");
  const auto weight = object.find("weight");
  const bool has_weight = weight != object.end() && weight->is_number_integer();
  const int64_t value = has_weight ? weight->get<int64_t>() : 0;
  node.weight = static_cast<int32_t>(std::clamp<int64_t>(value, 0, int64_t{kNodeWeightMax} + 1));
  CERTKV_RETURN_IF_ERROR(CheckNode(node));
  return node;
}

ShardMap::ShardMap(std::vector<Node> nodes, int64_t revision)
    : nodes_(std::move(nodes)), revision_(revision) {
  std::sort(nodes_.begin(), nodes_.end(),
            [](const Node& a, const Node& b) { return a.name < b.name; });
  seeds_.reserve(nodes_.size());
  for (const Node& node : nodes_) seeds_.push_back(XXH3_64bits(node.name.data(), node.name.size()));
}

double ShardMap::CostOf(size_t node, const BlockKey& root) const {
  const uint64_t hash = XXH3_64bits_withSeed(root.view().data(), root.view().size(), seeds_[node]);
  return -std::log(Uniform(hash)) / nodes_[node].weight;
}

const Node* ShardMap::OwnerOf(const BlockKey& root) const {
  const Node* owner = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const double cost = CostOf(i, root);
    // Of equal costs the first name's, on every node.
    if (owner != nullptr && !(cost < least)) continue;
    owner = &nodes_[i];
    least = cost;
  }
  return owner;
}

std::vector<const Node*> ShardMap::RankedFor(const BlockKey& root, size_t count) const {
  std::vector<std::pair<double, size_t>> costs;  // of equal costs the first name's comes first
  for (size_t i = 0; i < nodes_.size(); ++i) costs.emplace_back(CostOf(i, root), i);
  count = std::min(count, costs.size());
  std::partial_sort(costs.begin(), costs.begin() + static_cast<std::ptrdiff_t>(count), costs.end());
  std::vector<const Node*> ranked;
  for (size_t i = 0; i < count; ++i) ranked.push_back(&nodes_[costs[i].second]);
  return ranked;
}

const Node* ShardMap::Find(absl::string_view name) const {
  const auto node = std::lower_bound(
      nodes_.begin(), nodes_.end(), name,
      [](const Node& entry, absl::string_view wanted) { return entry.name < wanted; });
  return node != nodes_.end() && node->name == name ? &*node : nullptr;
}

}  // namespace certkv::cluster
