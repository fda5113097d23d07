// LruList: an intrusive list of blocks in the order of their last use.
#ifndef CERTKV_SERVICES_KVSTORE_LRU_LIST_H_
#define CERTKV_SERVICES_KVSTORE_LRU_LIST_H_

#include <cstdint>

#include "kernels/core/check.h"

namespace certkv::kvstore {

// Index of a block's record in its cache's BlockIndex; stable while the block lives.
enum class BlockId : int32_t { kNone = -1 };

// Part of a record: its neighbours in one list.
struct LruLinks {
  static constexpr int32_t kUnlinked = -2;
  int32_t older = kUnlinked;  // -1: the oldest
  int32_t newer = kUnlinked;  // -1: the newest
  bool linked() const { return older != kUnlinked; }
};

// `Record` has a member of type LruLinks; `Records` maps an int32_t to a Record& by operator[].
//
// Invariants:
//  1. A record is in the list exactly while its links say linked().
//  2. older and newer are each other's inverse from end to end.
// Threads: the caller serializes.
template <typename Record, typename Records>
class LruList {
 public:
  LruList(Records* records, LruLinks Record::*links) : records_(records), links_(links) {}

  bool empty() const { return oldest_ < 0; }
  BlockId oldest() const { return BlockId{oldest_}; }
  BlockId NewerThan(BlockId id) const { return BlockId{LinksOf(static_cast<int32_t>(id)).newer}; }

  // Adds at the most recent end.
  void Add(BlockId id) {
    const auto index = static_cast<int32_t>(id);
    LruLinks& links = LinksOf(index);
    CERTKV_CHECK(!links.linked(), "a record is in an LRU list once");
    links = LruLinks{newest_, -1};
    (newest_ < 0 ? oldest_ : LinksOf(newest_).newer) = index;
    newest_ = index;
  }

  void Remove(BlockId id) {
    LruLinks& links = LinksOf(static_cast<int32_t>(id));
    CERTKV_CHECK(links.linked(), "only a linked record is removed from an LRU list");
    (links.older < 0 ? oldest_ : LinksOf(links.older).newer) = links.newer;
    (links.newer < 0 ? newest_ : LinksOf(links.newer).older) = links.older;
    links = LruLinks{};
  }

 private:
  LruLinks& LinksOf(int32_t index) const { return (*records_)[index].*links_; }

  Records* const records_;
  LruLinks Record::*const links_;
  int32_t oldest_ = -1;
  int32_t newest_ = -1;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_LRU_LIST_H_
