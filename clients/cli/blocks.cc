// `certkv ls`, `pin`, `unpin` and `drop`: the store's blocks as an operator looks after them.
#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "clients/cli/commands.h"
#include "clients/cli/table.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

using client::StoreClient;
using nlohmann::json;

constexpr int32_t kPageSize = 1000;
constexpr size_t kHexDigitsMin = 8;

const char* TierName(certkv::kvstore::v1::BlockTier tier) {
  return tier == certkv::kvstore::v1::BLOCK_TIER_DEVICE ? "device" : "backing";
}

absl::Status List(const GlobalOptions& global, const ListOptions& options) {
  StoreClient store(client::ResolveTargets(global.services));
  Table table;
  for (const char* title : {"cache", "block", "parent"})
    table.AddColumn(title, Table::Align::kLeft);
  for (const char* title : {"tier", "leases", "pinned", "quantized", "original", "last use"}) {
    table.AddColumn(title);
  }
  json data = {{"blocks", json::array()}};
  std::string page_token;
  int32_t left = options.limit;
  do {
    CERTKV_ASSIGN_OR_RETURN(const auto page, store.ListBlocks(CacheId{options.cache_id},
                                                              std::min(left, 1000), page_token));
    for (const auto& block : page.blocks()) {
      table.AddRow(
          {absl::StrCat(block.cache_id()), ToHex(block.block_key(), 8),
           ToHex(block.parent_key(), 8), TierName(block.tier()), absl::StrCat(block.lease_count()),
           block.pinned() ? "yes" : "", FormatBytes(block.device_bytes()),
           FormatBytes(block.original_bytes()),
           FormatAge(absl::ToUnixMillis(absl::Now()) - block.last_use_time_ms()) + " ago"});
      data["blocks"].push_back({{"cache_id", block.cache_id()},
                                {"block_key", ToHex(block.block_key())},
                                {"parent_key", ToHex(block.parent_key())},
                                {"tier", TierName(block.tier())},
                                {"lease_count", block.lease_count()},
                                {"pinned", block.pinned()},
                                {"device_bytes", block.device_bytes()},
                                {"original_bytes", block.original_bytes()},
                                {"last_use_time_ms", block.last_use_time_ms()}});
    }
    left -= page.blocks_size();
    page_token = page.next_page_token();
  } while (left > 0 && !page_token.empty());
  data["more"] = !page_token.empty();
  Print(global, data,
        absl::StrCat(table.Render(), page_token.empty() ? "" : "more blocks: raise --limit\n"));
  return absl::OkStatus();
}

// A block of the store as pins and drops need it.
struct ListedBlock {
  int64_t cache = 0;
  BlockKey key;
  std::string parent;  // hex
};
// By key in hex, so that those with a prefix stand together.
using BlockMap = std::map<std::string, ListedBlock>;

absl::StatusOr<BlockMap> AllBlocks(StoreClient& store, int64_t cache_id) {
  BlockMap blocks;
  std::string page_token;
  do {
    CERTKV_ASSIGN_OR_RETURN(const auto page,
                            store.ListBlocks(CacheId{cache_id}, kPageSize, page_token));
    for (const auto& block : page.blocks()) {
      CERTKV_ASSIGN_OR_RETURN(const BlockKey key, BlockKeyFromBytes(block.block_key()));
      blocks[ToHex(block.block_key())] = {block.cache_id(), key, ToHex(block.parent_key())};
    }
    page_token = page.next_page_token();
  } while (!page_token.empty());
  return blocks;
}

// The one block whose key begins with `text`.
absl::StatusOr<BlockMap::const_iterator> FindBlock(const BlockMap& blocks,
                                                   const std::string& text) {
  const std::string start = absl::AsciiStrToLower(text);
  const bool is_hex =
      std::all_of(start.begin(), start.end(), [](char c) { return absl::ascii_isxdigit(c); });
  if (!is_hex || start.size() < kHexDigitsMin) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BLOCK_NAME_INVALID",
        absl::StrCat("\"", text, "\" is no block: name it by the first ", kHexDigitsMin,
                     " or more hexadecimal digits of its key, as certkv ls does"));
  }
  const auto found = blocks.lower_bound(start);
  if (found == blocks.end() || !absl::StartsWith(found->first, start)) {
    return MakeError(
        absl::StatusCode::kNotFound, "BLOCK_NOT_FOUND",
        absl::StrCat("no block in memory has a key that begins with ", start, "; see certkv ls"));
  }
  const auto next = std::next(found);
  if (next != blocks.end() && absl::StartsWith(next->first, start)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BLOCK_NAME_INVALID",
                     absl::StrCat("the keys of several blocks begin with ", start,
                                  "; give more digits, as certkv ls --json prints them"));
  }
  return found;
}

// The named blocks of each cache; with `prefixes` also all that come before them, parents first.
absl::StatusOr<std::map<int64_t, std::vector<BlockKey>>> ResolveBlocks(
    const BlockMap& blocks, const std::vector<std::string>& names, bool prefixes) {
  std::map<int64_t, std::vector<BlockKey>> resolved;
  std::set<std::string> taken;
  for (const std::string& name : names) {
    CERTKV_ASSIGN_OR_RETURN(auto block, FindBlock(blocks, name));
    std::deque<BlockKey> chain;
    const int64_t cache = block->second.cache;
    while (block != blocks.end() && taken.insert(block->first).second) {
      chain.push_front(block->second.key);
      if (!prefixes) break;
      block = blocks.find(block->second.parent);
    }
    std::vector<BlockKey>& keys = resolved[cache];
    keys.insert(keys.end(), chain.begin(), chain.end());
  }
  return resolved;
}

absl::StatusOr<int64_t> ChangeCache(StoreClient& store, SessionId session,
                                    absl::Span<const BlockKey> keys, const BlocksOptions& options) {
  int64_t changed = 0;
  for (size_t first = 0; first < keys.size(); first += kBlocksPerCallMax) {
    const auto batch = keys.subspan(first, kBlocksPerCallMax);
    if (options.action == BlocksAction::kDrop) {
      CERTKV_ASSIGN_OR_RETURN(const int32_t dropped, store.DropBlocks(session, batch));
      changed += dropped;
      continue;
    }
    CERTKV_RETURN_IF_ERROR(store.PinBlocks(session, batch, options.action == BlocksAction::kPin,
                                           options.ttl_seconds * 1000));
    changed += static_cast<int64_t>(batch.size());
  }
  return changed;
}

absl::Status Change(const GlobalOptions& global, const BlocksOptions& options) {
  client::Options services = client::ResolveTargets(global.services);
  services.worker_name = "certkv";
  services.staging_slot_count = 1;  // it writes nothing
  StoreClient store(services);
  CERTKV_ASSIGN_OR_RETURN(const BlockMap blocks, AllBlocks(store, options.cache_id));
  CERTKV_ASSIGN_OR_RETURN(
      const auto resolved,
      ResolveBlocks(blocks, options.blocks, options.action != BlocksAction::kDrop));
  int64_t changed = 0;
  for (const auto& [cache, keys] : resolved) {
    CERTKV_ASSIGN_OR_RETURN(const auto session, store.AttachWorker(CacheId{cache}));
    const auto count = ChangeCache(store, session.session, keys, options);
    store.DetachWorker(session.session).IgnoreError();
    if (!count.ok()) return count.status();
    changed += *count;
  }
  const char* done = options.action == BlocksAction::kPin     ? "pinned"
                     : options.action == BlocksAction::kUnpin ? "unpinned"
                                                              : "dropped";
  Print(global, {{"blocks", changed}, {"change", done}},
        absl::StrCat(FormatCount(changed), " blocks ", done,
                     options.ttl_seconds == 0
                         ? ""
                         : absl::StrCat(" for ", FormatAge(options.ttl_seconds * 1000)),
                     "\n"));
  return absl::OkStatus();
}

}  // namespace

int RunList(const GlobalOptions& global, const ListOptions& options) {
  const absl::Status status = List(global, options);
  return status.ok() ? kExitOk : Fail(status);
}

int RunBlocks(const GlobalOptions& global, const BlocksOptions& options) {
  const absl::Status status = Change(global, options);
  return status.ok() ? kExitOk : Fail(status);
}

}  // namespace certkv::cli
