#include "bench/services/cluster_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"

namespace certkv::bench {
namespace {

constexpr int kPrompts = 20;  // of each tenant
constexpr int kDocuments = 400;
constexpr double kTenantsPerNode = 4;
constexpr int kConversationsPerNode = 200;  // that may go on

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15 + (a << 6) + (a >> 2))) * 0xff51afd7ed558ccd;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53;
  return x ^ (x >> 33);
}

struct Segment {
  uint64_t id = 0;  // of its content and all before it
  int32_t blocks = 0;
};
struct Request {
  std::vector<Segment> chain;
  int last_node = -1;  // where its conversation was
};

// The tenants', prompts' and documents' law is that of certkv-bench-eviction; tenants grow with the
// cluster, so that each node has as much of its own.
class Traffic {
 public:
  Traffic(int node_count, uint64_t seed)
      : random_(seed),
        tenants_(std::max(1, static_cast<int>(kTenantsPerNode * node_count)), 1.0),
        open_limit_(static_cast<size_t>(kConversationsPerNode) * static_cast<size_t>(node_count)) {}

  Request Next() {
    Request request;
    const uint64_t kind = random_() % 20;
    if (kind == 0) {  // a long one that never comes back
      Extend(&request.chain, random_(), 64 + static_cast<int>(random_() % 64));
      return request;
    }
    if (kind < 11 && open_.size() > 16) {
      const size_t back = std::min(random_() % open_.size(), random_() % open_.size());
      const size_t place = open_.size() - 1 - back;
      std::swap(open_[place], open_.back());
      request = std::move(open_.back());
      open_.pop_back();
    } else {
      const auto tenant = static_cast<uint64_t>(tenants_.Draw(random_));
      const auto prompt = static_cast<uint64_t>(prompts_.Draw(random_));
      Extend(&request.chain, tenant << 32 | prompt << 16 | 1,
             4 + static_cast<int>(prompt * 7 % 21));
      if (random_() % 5 < 3) {
        const auto document = static_cast<uint64_t>(documents_.Draw(random_));
        Extend(&request.chain, tenant << 32 | document << 8 | 2,
               8 + static_cast<int>(document * 11 % 33));
      }
    }
    Extend(&request.chain, random_(), 1 + static_cast<int>(random_() % 4));
    return request;
  }
  // The request was served at `node` and may go on.
  void Keep(Request request, int node) {
    request.last_node = node;
    open_.push_back(std::move(request));
    if (open_.size() > open_limit_) open_.pop_front();
  }
  std::mt19937_64& random() { return random_; }

 private:
  static void Extend(std::vector<Segment>* chain, uint64_t content, int32_t blocks) {
    chain->push_back({Mix(chain->empty() ? 0 : chain->back().id, content), blocks});
  }

  std::mt19937_64 random_;
  const Zipf tenants_;
  const Zipf prompts_{kPrompts, 1.1};
  const Zipf documents_{kDocuments, 0.9};
  const size_t open_limit_;
  std::deque<Request> open_;
};

// One node: its cache, and when its processor and its link are free.
class NodeState {
 public:
  explicit NodeState(int64_t capacity) : capacity_(capacity) {}

  // Leading segments that are here.
  size_t Leading(const std::vector<Segment>& chain) const {
    size_t count = 0;
    while (count < chain.size() && places_.contains(chain[count].id)) ++count;
    return count;
  }
  // Makes the whole chain the most recently used; the end of it leaves first.
  void Use(const std::vector<Segment>& chain) {
    for (auto segment = chain.rbegin(); segment != chain.rend(); ++segment) {
      const auto place = places_.find(segment->id);
      if (place != places_.end()) {
        order_.splice(order_.begin(), order_, place->second);
        continue;
      }
      order_.push_front(*segment);
      places_[segment->id] = order_.begin();
      used_ += segment->blocks;
    }
    while (used_ > capacity_ && !order_.empty()) {
      used_ -= order_.back().blocks;
      places_.erase(order_.back().id);
      order_.pop_back();
    }
  }

  double compute_free = 0;  // time
  double link_free = 0;
  double sent_bytes = 0;

 private:
  const int64_t capacity_;
  int64_t used_ = 0;
  std::list<Segment> order_;  // the most recently used first
  absl::flat_hash_map<uint64_t, std::list<Segment>::iterator> places_;
};

int64_t Blocks(const std::vector<Segment>& chain, size_t begin, size_t end) {
  int64_t blocks = 0;
  for (size_t i = begin; i < end; ++i) blocks += chain[i].blocks;
  return blocks;
}

class Model {
 public:
  Model(const ClusterModelOptions& options, int64_t request_count)
      : options_(options), traffic_(options.node_count, options.seed) {
    for (int i = 0; i < options.node_count; ++i) AddNode();
    MakeMap();
    waits_.reserve(static_cast<size_t>(request_count));
  }

  ClusterModelResult Run(int64_t request_count) {
    std::exponential_distribution<double> gap(options_.requests_per_second * options_.node_count);
    double next_change = options_.churn_seconds;
    for (int64_t i = 0; i < request_count; ++i) {
      now_ += gap(traffic_.random());
      while (options_.churn_seconds > 0 && now_ >= next_change) {
        Change();
        next_change += options_.churn_seconds;
      }
      Serve(traffic_.Next());
    }
    return Result();
  }

 private:
  struct Owners {
    int first = 0;
    int second = 0;
    int64_t revision = 0;
  };

  void AddNode() {
    names_[absl::StrCat("node-", next_name_)] = static_cast<int>(nodes_.size());
    live_.push_back(static_cast<int>(nodes_.size()));
    nodes_.push_back(std::make_unique<NodeState>(options_.blocks_per_node));
    ++next_name_;
  }
  void MakeMap() {
    std::vector<cluster::Node> nodes;
    for (const auto& [name, index] : names_) nodes.push_back({name, "x", "", 1, "i"});
    map_ = cluster::ShardMap(std::move(nodes), ++revision_);
  }
  // The oldest node leaves with all it has; another one comes.
  void Change() {
    const int left = live_.front();
    live_.erase(live_.begin());
    for (auto name = names_.begin(); name != names_.end(); ++name) {
      if (name->second != left) continue;
      names_.erase(name);
      break;
    }
    nodes_[left].reset();
    AddNode();
    MakeMap();
    result_.membership_changes += 2;
  }

  Owners OwnersOf(uint64_t root) {
    Owners& owners = owners_[root];
    if (owners.revision == revision_) return owners;
    BlockKey key;
    for (size_t i = 0; i < 4; ++i) {
      const uint64_t word = Mix(root, i);
      std::memcpy(key.bytes.data() + 8 * i, &word, 8);
    }
    const auto ranked = map_.RankedFor(key, 2);
    owners = {names_[ranked.front()->name], names_[ranked.back()->name], revision_};
    return owners;
  }

  int AnyNode() { return live_[traffic_.random()() % live_.size()]; }
  double ComputeSeconds(int64_t blocks) const {
    return static_cast<double>(blocks) * options_.block_tokens / options_.prefill_tokens_per_second;
  }
  double SendSeconds(int64_t blocks) const {
    return static_cast<double>(blocks) * options_.block_bytes / options_.link_bytes_per_second;
  }

  // What a request would wait at `node`, if nothing were pulled that the router does not know of.
  double Expected(int node, const std::vector<Segment>& chain) const {
    const size_t found = nodes_[node]->Leading(chain);
    return std::max(0.0, nodes_[node]->compute_free - now_) +
           ComputeSeconds(Blocks(chain, found, chain.size()));
  }
  int Choose(const Request& request, int owner) {
    if (options_.routing == Routing::kRandom) return AnyNode();
    if (options_.routing == Routing::kOwner) return owner;
    int best = owner;
    for (const int node : {request.last_node, AnyNode(), AnyNode()}) {
      const bool is_live = node >= 0 && nodes_[node] != nullptr;
      if (is_live && Expected(node, request.chain) < Expected(best, request.chain)) best = node;
    }
    return best;
  }

  // Sends `blocks` from `node`'s link; when they are there.
  double Send(int node, int64_t blocks, double from) {
    NodeState& sender = *nodes_[node];
    sender.link_free = std::max(sender.link_free, from) + SendSeconds(blocks);
    sender.sent_bytes += static_cast<double>(blocks) * options_.block_bytes;
    return sender.link_free + options_.peer_seconds;
  }

  // Pulls what `from` has beyond `found` segments; how many are there then.
  size_t Pull(int at, int from, const std::vector<Segment>& chain, size_t found, double* ready) {
    if (from == at || nodes_[from] == nullptr) return found;
    *ready += options_.peer_seconds;  // to ask
    const size_t has = nodes_[from]->Leading(chain);
    if (has <= found) return found;
    const int64_t blocks = Blocks(chain, found, has);
    // What is sooner computed than sent is computed.
    const double arrival = std::max(nodes_[from]->link_free, *ready) + SendSeconds(blocks);
    if (arrival - *ready > ComputeSeconds(blocks)) return found;
    *ready = Send(from, blocks, *ready);
    nodes_[from]->Use({chain.begin(), chain.begin() + static_cast<std::ptrdiff_t>(has)});
    result_.pulled_tokens += blocks * options_.block_tokens;
    result_.pulled_bytes += static_cast<double>(blocks) * options_.block_bytes;
    return has;
  }

  void Serve(Request request) {
    const std::vector<Segment>& chain = request.chain;
    const Owners owners = OwnersOf(chain.front().id);
    const int at = Choose(request, owners.first);
    NodeState& node = *nodes_[at];
    const size_t local = node.Leading(chain);
    double ready = now_ + options_.lookup_seconds;
    size_t found = local;
    if (found < chain.size()) found = Pull(at, owners.first, chain, found, &ready);
    if (found < chain.size() && options_.asks_second) {
      const size_t before = found;
      found = Pull(at, owners.second, chain, found, &ready);
      result_.moved_tokens += Blocks(chain, before, found) * options_.block_tokens;
    }
    const int64_t missing = Blocks(chain, found, chain.size());
    if (missing > 0) {
      node.compute_free = std::max(node.compute_free, ready) + ComputeSeconds(missing);
      ready = node.compute_free;
    }
    node.Use(chain);
    if (options_.offers && owners.first != at) {
      const size_t known = nodes_[owners.first]->Leading(chain);
      const int64_t lacking = Blocks(chain, known, chain.size());
      if (lacking > 0) {
        Send(at, lacking, ready);
        result_.offered_bytes += static_cast<double>(lacking) * options_.block_bytes;
      }
      nodes_[owners.first]->Use(chain);
    }
    ++result_.requests;
    result_.tokens += Blocks(chain, 0, chain.size()) * options_.block_tokens;
    result_.local_tokens += Blocks(chain, 0, local) * options_.block_tokens;
    waits_.push_back(static_cast<float>(ready - now_));
    if (chain.size() > 1) traffic_.Keep(std::move(request), at);
  }

  ClusterModelResult Result() {
    const auto quantile = [this](double share) {
      const auto place =
          static_cast<std::ptrdiff_t>(share * static_cast<double>(waits_.size() - 1));
      std::nth_element(waits_.begin(), waits_.begin() + place, waits_.end());
      return static_cast<double>(waits_[static_cast<size_t>(place)]);
    };
    result_.first_token_p50 = quantile(0.5);
    result_.first_token_p99 = quantile(0.99);
    result_.seconds = now_;
    double hottest = 0;
    double sum = 0;
    for (const int node : live_) {
      hottest = std::max(hottest, nodes_[node]->sent_bytes);
      sum += nodes_[node]->sent_bytes;
    }
    result_.busiest_link_share = hottest / options_.link_bytes_per_second / now_;
    if (sum > 0) result_.hottest_over_mean = hottest * static_cast<double>(live_.size()) / sum;
    return result_;
  }

  const ClusterModelOptions options_;
  Traffic traffic_;
  double now_ = 0;
  std::vector<std::unique_ptr<NodeState>> nodes_;  // by index; null: it has left
  std::vector<int> live_;                          // the oldest first
  absl::flat_hash_map<std::string, int> names_;
  int next_name_ = 0;
  cluster::ShardMap map_;
  int64_t revision_ = 0;
  absl::flat_hash_map<uint64_t, Owners> owners_;  // of roots, as of a revision
  std::vector<float> waits_;
  ClusterModelResult result_;
};

}  // namespace

const char* RoutingName(Routing routing) {
  switch (routing) {
    case Routing::kRandom:
      return "random";
    case Routing::kOwner:
      return "owner";
    case Routing::kPrefix:
      return "prefix";
  }
  return "?";
}

ClusterModelResult RunClusterModel(const ClusterModelOptions& options, int64_t request_count) {
  return Model(options, request_count).Run(request_count);
}

}  // namespace certkv::bench
