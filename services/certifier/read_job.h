// ReadJob: the reads of one message, in parallel over (read, KV head) on the io_context's threads.
#ifndef CERTKV_SERVICES_CERTIFIER_READ_JOB_H_
#define CERTKV_SERVICES_CERTIFIER_READ_JOB_H_

#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>

#include "certkv/certifier/v1/certifier.pb.h"
#include "services/certifier/read_engine.h"
#include "services/certifier/view_table.h"
#include "services/common/clock.h"

namespace certkv::certifier {

inline constexpr char kErrorDomain[] = "certifier.certkv";

// What reads run with. Outlives every job.
struct ReadContext {
  ViewTable* views;
  WorkspacePool* workspaces;
  const ReadEngine* engine;
  const Clock* clock;
  boost::asio::io_context* io_context;
};

struct ReadJobOptions {
  bool want_outputs = true;
  bool audit = false;
  bool measure_only = false;  // Certify: nothing repaired, nothing charged
};

// Computes `reads` and calls `done` once, on one of the io_context's threads, when `results` holds
// one result per read, in order. `reads` and `results` stay valid until then. Doesn't block.
void StartReadJob(const ReadContext& context,
                  const google::protobuf::RepeatedPtrField<certkv::certifier::v1::Read>& reads,
                  const ReadJobOptions& options,
                  google::protobuf::RepeatedPtrField<certkv::certifier::v1::ReadResult>* results,
                  std::function<void()> done);

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_JOB_H_
