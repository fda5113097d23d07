#include "services/gate/ledger.h"

#include <algorithm>

namespace certkv::gate {
namespace {

thread_local LedgerDeadline::Time deadline_of_thread = LedgerDeadline::Time::min();

}  // namespace

LedgerDeadline::LedgerDeadline(Time time) : before_(deadline_of_thread) {
  deadline_of_thread = time;
}
LedgerDeadline::~LedgerDeadline() { deadline_of_thread = before_; }

std::chrono::microseconds LedgerDeadline::Left() {
  const Time now = std::chrono::steady_clock::now();
  if (deadline_of_thread <= now) return std::chrono::microseconds(0);
  return std::chrono::duration_cast<std::chrono::microseconds>(deadline_of_thread - now);
}

}  // namespace certkv::gate
