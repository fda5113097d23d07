#include "services/gate/ledger_redis.h"

#include <hiredis/hiredis.h>
#include <sys/time.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/core/status.h"
#include "services/common/random_id.h"
#include "services/gate/budget_units.h"
#include "services/gate/ledger_script.h"

namespace certkv::gate {
namespace {

constexpr char kEnded[] = "EPOCH";
// Idle connections kept; more are made when more calls run at once.
constexpr size_t kIdleConnectionsMax = 64;
// The words of a LedgerState in an answer, without its status.
constexpr size_t kStateWords = 7;

absl::Status Unavailable(absl::string_view what) {
  return MakeError(absl::StatusCode::kUnavailable, "LEDGER_UNAVAILABLE",
                   absl::StrCat("the shared ledger did not answer in time or at all: ", what,
                                "; reads are exact until it does; check gate.ledger_redis"));
}

timeval TimeLeft() {
  // A timeval of 0 would mean no limit.
  const int64_t microseconds = std::max<int64_t>(1, LedgerDeadline::Left().count());
  return {.tv_sec = microseconds / 1'000'000, .tv_usec = microseconds % 1'000'000};
}

struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;

bool IsText(const redisReply& reply) {
  return reply.type == REDIS_REPLY_STRING || reply.type == REDIS_REPLY_STATUS;
}

std::string TextOf(const redisReply& reply) { return {reply.str, reply.len}; }

// The value of "name:" in what INFO tells.
std::string InfoField(const std::string& info, absl::string_view name) {
  for (absl::string_view line : absl::StrSplit(info, '\n')) {
    line = absl::StripSuffix(line, "\r");
    if (absl::ConsumePrefix(&line, absl::StrCat(name, ":"))) return std::string(line);
  }
  return "";
}

int64_t ToUnits(const std::string& word) {
  int64_t units = 0;
  // What is no number is nothing left.
  return absl::SimpleAtoi(word, &units) ? units : 0;
}

LedgerState StateOf(const std::vector<std::string>& words) {
  LedgerState state;
  state.known = words[0] == "1";
  state.closed = words[1] == "1";
  state.is_void = words[2] == "1";
  state.overrun = words[3] == "1";
  state.forced_reason = words[4];
  state.limit_units = ToUnits(words[5]);
  state.left_units = ToUnits(words[6]);
  return state;
}

}  // namespace

void RedisLedger::Free::operator()(redisContext* context) const { redisFree(context); }

RedisLedger::RedisLedger(RedisOptions options) : options_(std::move(options)) {
  // hiredis writes to a connection that Redis has closed; as in every server (server_runner.cc).
  std::signal(SIGPIPE, SIG_IGN);
}
RedisLedger::~RedisLedger() = default;

absl::StatusOr<RedisLedger::Words> RedisLedger::Ask(redisContext* context, const Words& command) {
  if (LedgerDeadline::Left().count() == 0) return Unavailable("no time was left to ask it");
  if (redisSetTimeout(context, TimeLeft()) != REDIS_OK) return Unavailable(context->errstr);
  std::vector<const char*> words;
  std::vector<size_t> sizes;
  for (const std::string& word : command) {
    words.push_back(word.data());
    sizes.push_back(word.size());
  }
  const Reply reply(static_cast<redisReply*>(
      redisCommandArgv(context, static_cast<int>(words.size()), words.data(), sizes.data())));
  if (reply == nullptr) return Unavailable(context->errstr);
  if (reply->type == REDIS_REPLY_ERROR) return Unavailable(TextOf(*reply));
  if (IsText(*reply)) return Words{TextOf(*reply)};
  if (reply->type != REDIS_REPLY_ARRAY) return Unavailable("it answers with something else");
  Words answer;
  for (size_t i = 0; i < reply->elements; ++i) {
    if (!IsText(*reply->element[i])) return Unavailable("its answer is not made of words");
    answer.push_back(TextOf(*reply->element[i]));
  }
  return answer;
}

absl::StatusOr<RedisLedger::Connection> RedisLedger::Connect() const {
  if (LedgerDeadline::Left().count() == 0) return Unavailable("no time was left to connect");
  Connection connection;
  const RedisAddress& address = options_.address;
  connection.context.reset(
      address.unix_path.empty()
          ? redisConnectWithTimeout(address.ip.c_str(), address.port, TimeLeft())
          : redisConnectUnixWithTimeout(address.unix_path.c_str(), TimeLeft()));
  redisContext* const context = connection.context.get();
  if (context == nullptr || context->err != 0) {
    return Unavailable(context == nullptr ? "no memory for a connection" : context->errstr);
  }
  if (!options_.password.empty()) {
    CERTKV_RETURN_IF_ERROR(Ask(context, {"AUTH", options_.password}).status());
  }
  CERTKV_ASSIGN_OR_RETURN(const Words info, Ask(context, {"INFO"}));
  if (InfoField(info[0], "maxmemory_policy") != "noeviction") {
    return Unavailable(absl::StrCat("its maxmemory-policy is ",
                                    InfoField(info[0], "maxmemory_policy"),
                                    ", which forgets budgets; set noeviction"));
  }
  if (InfoField(info[0], "role") != "master") {
    return Unavailable("it is a replica of another Redis; give the address of its master");
  }
  CERTKV_ASSIGN_OR_RETURN(
      const Words sha, Ask(context, {"SCRIPT", "LOAD", std::string(LedgerScript("ledger.lua"))}));
  connection.script = sha[0];
  // A process of Redis never changes under a connection.
  const std::string candidate = absl::BytesToHexString(RandomBytes(16));
  CERTKV_ASSIGN_OR_RETURN(
      const Words joined,
      Ask(context, {"EVALSHA", sha[0], "3", absl::StrCat(options_.prefix, "epoch"),
                    absl::StrCat(options_.prefix, "r:"), absl::StrCat(options_.prefix, "t:"),
                    "join", candidate, "0", "", "0", InfoField(info[0], "run_id")}));
  if (joined.size() != 2) return Unavailable("it can't be joined");
  connection.epoch = joined[1];
  return connection;
}

void RedisLedger::NoteFailure() {
  // What is broken fails before its time is over.
  const bool is_late = LedgerDeadline::Left().count() == 0;
  absl::MutexLock lock(&mutex_);
  if (is_late && ++late_answers_ < kLateAnswersMax) return;
  down_until_ = std::chrono::steady_clock::now() + kRetryAfter;
  // They are likely to be of the same server.
  idle_.clear();
}

void RedisLedger::NoteAnswer() {
  absl::MutexLock lock(&mutex_);
  down_until_ = {};
  late_answers_ = 0;
}

absl::StatusOr<RedisLedger::Connection> RedisLedger::TakeConnection() {
  {
    absl::MutexLock lock(&mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (now < down_until_) return Unavailable("it failed a moment ago and is tried again soon");
    if (!idle_.empty()) {
      Connection connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
    // While this one tries after a failure, others need not.
    if (down_until_ != std::chrono::steady_clock::time_point()) down_until_ = now + kRetryAfter;
  }
  absl::StatusOr<Connection> connection = Connect();
  if (!connection.ok()) {
    NoteFailure();
  } else {
    NoteAnswer();
  }
  return connection;
}

absl::StatusOr<RedisLedger::Words> RedisLedger::Run(const std::string& operation,
                                                    const std::string& request,
                                                    const LedgerTenant& tenant,
                                                    const Words& arguments) {
  // The call waited too long for its thread, which says nothing of Redis.
  if (LedgerDeadline::Left().count() == 0) return Unavailable("no time was left to ask it");
  CERTKV_ASSIGN_OR_RETURN(Connection connection, TakeConnection());
  const bool has_tenant = !tenant.name.empty() && tenant.limit_units != kUnitsMax;
  Words command = {"EVALSHA",
                   connection.script,
                   "3",
                   absl::StrCat(options_.prefix, "epoch"),
                   absl::StrCat(options_.prefix, "r:", request),
                   absl::StrCat(options_.prefix, "t:", tenant.name),
                   operation,
                   connection.epoch,
                   absl::StrCat(options_.keep_ms),
                   has_tenant ? absl::StrCat(tenant.limit_units) : "",
                   absl::StrCat(tenant.window_ms)};
  command.insert(command.end(), arguments.begin(), arguments.end());
  absl::StatusOr<Words> answer = Ask(connection.context.get(), command);
  if (!answer.ok()) {
    // The connection is dropped: a late answer on it would be taken for the next call's.
    NoteFailure();
    return answer;
  }
  NoteAnswer();
  if (answer->empty() || (*answer)[0] != "OK") return Words{kEnded};
  absl::MutexLock lock(&mutex_);
  if (idle_.size() < kIdleConnectionsMax) idle_.push_back(std::move(connection));
  return answer;
}

absl::StatusOr<RedisLedger::Words> RedisLedger::Step(const std::string& operation,
                                                     const std::string& request,
                                                     const LedgerTenant& tenant,
                                                     const Words& arguments) {
  return RunInEpoch(operation, request, tenant, arguments, kStateWords);
}

absl::StatusOr<RedisLedger::Words> RedisLedger::RunInEpoch(const std::string& operation,
                                                           const std::string& request,
                                                           const LedgerTenant& tenant,
                                                           const Words& arguments,
                                                           size_t word_count_min) {
  CERTKV_ASSIGN_OR_RETURN(Words answer, Run(operation, request, tenant, arguments));
  if (answer[0] == kEnded) {
    {
      absl::MutexLock lock(&mutex_);
      idle_.clear();  // all joined the epoch that ended
    }
    CERTKV_ASSIGN_OR_RETURN(answer, Run(operation, request, tenant, arguments));
  }
  if (answer[0] == kEnded || answer.size() < 1 + word_count_min) {
    return Unavailable("its keys vanish while they are written");
  }
  answer.erase(answer.begin());
  return answer;
}

absl::StatusOr<LedgerState> RedisLedger::Open(const std::string& request,
                                              const LedgerOpening& opening) {
  CERTKV_ASSIGN_OR_RETURN(
      const Words words,
      Step("open", request, {}, {opening.record, absl::StrCat(opening.limit_units)}));
  LedgerState state = StateOf(words);
  if (words.size() > kStateWords) state.record = words[kStateWords];
  return state;
}

absl::StatusOr<LedgerState> RedisLedger::Load(const std::string& request) {
  CERTKV_ASSIGN_OR_RETURN(const Words words, Step("load", request, {}, {}));
  LedgerState state = StateOf(words);
  if (words.size() > kStateWords) state.record = words[kStateWords];
  return state;
}

absl::StatusOr<LedgerGrant> RedisLedger::Grant(const std::string& request,
                                               const LedgerTenant& tenant,
                                               const LedgerGrantAsk& ask) {
  CERTKV_ASSIGN_OR_RETURN(const Words words,
                          Step("grant", request, tenant,
                               {absl::StrCat(ask.lease_id), absl::StrCat(ask.units),
                                ask.schedule == SliceSchedule::kUnion ? "union" : "share"}));
  if (words.size() <= kStateWords) return Unavailable("its answer to a grant is too short");
  return LedgerGrant{ToUnits(words[kStateWords]), StateOf(words)};
}

absl::StatusOr<LedgerCount> RedisLedger::Count(const std::string& request,
                                               const LedgerTenant& tenant,
                                               const LedgerBatch& batch) {
  Words arguments = {absl::StrCat(batch.reporter_id), absl::StrCat(batch.batch_number),
                     absl::StrCat(batch.read_count),  absl::StrCat(batch.certified_units),
                     absl::StrCat(batch.exact_units), batch.forced_reason};
  for (const LedgerReturn& slice : batch.returned) {
    arguments.push_back(absl::StrCat(slice.lease_id));
    arguments.push_back(absl::StrCat(slice.spent_units));
  }
  CERTKV_ASSIGN_OR_RETURN(const Words words, Step("count", request, tenant, arguments));
  if (words.size() <= kStateWords + 1) return Unavailable("its answer to a batch is too short");
  return LedgerCount{words[kStateWords] == "counted", ToUnits(words[kStateWords + 1]),
                     StateOf(words)};
}

absl::StatusOr<LedgerGrant> RedisLedger::Decide(const std::string& request,
                                                const LedgerTenant& tenant, int64_t units,
                                                bool exact) {
  CERTKV_ASSIGN_OR_RETURN(
      const Words words, Step("decide", request, tenant, {absl::StrCat(units), exact ? "1" : "0"}));
  if (words.size() <= kStateWords) return Unavailable("its answer to a decision is too short");
  return LedgerGrant{words[kStateWords] == "1" ? units : 0, StateOf(words)};
}

absl::StatusOr<LedgerState> RedisLedger::Close(const std::string& request) {
  CERTKV_ASSIGN_OR_RETURN(const Words words, Step("close", request, {}, {}));
  return StateOf(words);
}

absl::StatusOr<std::vector<int64_t>> RedisLedger::TenantsCommitted(
    const std::vector<std::string>& tenants, int64_t window_ms) {
  const LedgerTenant window{.name = "", .limit_units = 0, .window_ms = window_ms};
  CERTKV_ASSIGN_OR_RETURN(const Words words,
                          RunInEpoch("tenants", "", window, tenants, tenants.size()));
  std::vector<int64_t> committed;
  for (const std::string& word : words) committed.push_back(ToUnits(word));
  return committed;
}

absl::StatusOr<LedgerPolicy> RedisLedger::PutPolicy(const LedgerPolicy& policy) {
  CERTKV_ASSIGN_OR_RETURN(
      const Words words,
      RunInEpoch("policy", "", {}, {absl::StrCat(policy.version), policy.text, policy.source}, 3));
  return LedgerPolicy{ToUnits(words[0]), words[1], words[2]};
}

}  // namespace certkv::gate
