// Scratch of one KV head's read, reused from read to read.
#ifndef CERTKV_SERVICES_CERTIFIER_READ_WORKSPACE_H_
#define CERTKV_SERVICES_CERTIFIER_READ_WORKSPACE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/finish_certificate.h"
#include "services/certifier/repair_ladder.h"

namespace certkv::certifier {

// The largest read that a workspace has room for.
struct WorkspaceShape {
  int32_t group_size = 0;    // G
  int32_t head_dim = 0;      // d
  int32_t value_dim = 0;     // d_v
  int64_t tile_count = 0;    // T
  int64_t atom_count = 0;    // A, of Attend and AttendProgressive
  int64_t attend_bytes = 0;  // scratch of both

  // The smallest shape with room for both.
  void Include(const WorkspaceShape& other);
  friend bool operator==(const WorkspaceShape&, const WorkspaceShape&) = default;
};

// A read of these tiles, then tail_count tokens of the tail, by all heads of a group.
WorkspaceShape ShapeOfRead(const CacheSpec& spec, const TileLayout& layout, int32_t tile_count,
                           int32_t tail_count);
// Reads of up to `token_count` tokens of any layer.
WorkspaceShape ShapeOfReads(const CacheSpec& spec, int64_t token_count);

// Threads: used by one read at a time.
class ReadWorkspace {
 public:
  // Makes room for `shape`; never shrinks. Allocates only when there is not enough.
  void Reserve(const WorkspaceShape& shape);
  const WorkspaceShape& shape() const { return shape_; }
  void* attend_scratch() const { return attend_scratch_.get(); }  // 64-byte aligned

  std::vector<AttendTile> tiles;       // [T]
  std::vector<uint8_t> original_held;  // [T] the tile's originals were checked and may be read
  std::vector<uint8_t> sources;        // [G][T] kSource bits, of all heads of the group
  std::vector<HeadLadder> ladders;     // [G]
  LadderWorkspace ladder;
  FinishWorkspace finish;
  // Of the heads that the present pass of Attend reads, densely: its arguments and its results.
  std::vector<float> pass_queries;              // [G][d]
  std::vector<float> pass_sink_logits;          // [G]
  std::vector<float> pass_failure_probability;  // [G]
  std::vector<uint8_t> pass_sources;            // [G][T]
  std::vector<float> outputs;                   // [G][d_v]
  std::vector<float> lse_nat;                   // [G]
  std::vector<float> block_lse;                 // [G][A]
  std::vector<float> block_max_logit;           // [G][A]
  std::vector<float> logit_half_width;          // [G][A]
  std::vector<float> top_half_width;            // [G][A]
  std::vector<float> tile_value_error;          // [G][T]
  std::vector<float> value_term;                // [G]
  std::vector<float> rounding_term;             // [G]
  // And of AttendProgressive alone.
  std::vector<float> pass_skip_tolerance;  // [G]
  std::vector<int32_t> atom_count;         // [G]
  std::vector<float> skipped_lse_nat;      // [G]
  std::vector<uint8_t> sub_blocks_read;    // [G][T]

 private:
  struct AlignedDelete {
    void operator()(uint8_t* memory) const;
  };
  WorkspaceShape shape_;
  std::unique_ptr<uint8_t[], AlignedDelete> attend_scratch_;
};

// Workspaces of the threads that read. All have room for the views that are open: they grow when a
// view is opened or grows, not when it is read.
// Threads: all methods may be called concurrently.
class WorkspacePool {
 public:
  // Makes `count` workspaces: one for each thread that reads.
  explicit WorkspacePool(int32_t count);

  // Makes room in every workspace for reads of `token_count` tokens, in those in use when they come
  // back. Rounded up to a power of two, so that a view that grows does it rarely.
  void Reserve(const CacheSpec& spec, int64_t token_count) ABSL_LOCKS_EXCLUDED(mutex_);

  // Owns a workspace and gives it back in the end.
  class Handle {
   public:
    Handle(WorkspacePool* pool, std::unique_ptr<ReadWorkspace> workspace)
        : pool_(pool), workspace_(std::move(workspace)) {}
    Handle(Handle&&) = default;
    Handle& operator=(Handle&&) = delete;
    ~Handle() {
      if (workspace_ != nullptr) pool_->Return(std::move(workspace_));
    }
    ReadWorkspace* get() const { return workspace_.get(); }

   private:
    WorkspacePool* pool_;
    std::unique_ptr<ReadWorkspace> workspace_;
  };
  // Makes one more when all are in use.
  Handle Take() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Return(std::unique_ptr<ReadWorkspace> workspace) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex mutex_;
  WorkspaceShape shape_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<ReadWorkspace>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_WORKSPACE_H_
