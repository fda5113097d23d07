// Makes the order that Abseil's locks give visible to ThreadSanitizer; linked into every program of
// the tsan build, and into nothing else.
//
// Debian's Abseil is not built with -fsanitize=thread, so the tool cannot see that an Unlock comes
// before the next Lock, and reports every guarded field as a race. The definitions below take the
// place of the library's (a symbol of the program comes before one of a shared library, also for
// the calls inside gRPC), tell the tool about the order, and call the library's function.
//
// While the library's function runs, reads and writes are not recorded: Unlock evaluates the
// Conditions of other threads, which is guarded, but after the point where the order is given away.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <typeinfo>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

extern "C" {
// Of the sanitizer's runtime; GCC 12 has no header for the last four.
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace certkv {
namespace {

// `member` is the mangled name after the class, as in "4LockEv". The class part comes from the
// type, because the name of Abseil's inline namespace differs between builds of it.
template <typename Class, bool kConst = false>
void* LibraryFunction(const char* member) {
  std::string name = typeid(Class).name();  // "N4absl7debian35MutexE"
  name = std::string(kConst ? "_ZNK" : "_ZN") + name.substr(1, name.size() - 2) + member;
  void* function = dlsym(RTLD_NEXT, name.c_str());
  if (function == nullptr) {
    std::fprintf(stderr,
                 "cmake/tsan_abseil.cc: Abseil's library has no %s; it changed, adapt this file\n",
                 name.c_str());
    std::abort();
  }
  return function;
}

// A member function called through a pointer takes `this` as its first argument (Itanium ABI).
template <typename Result, typename... Args>
Result CallLibrary(void* function, const void* object, Args... args) {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  struct Restore {
    ~Restore() {
      AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
      AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
  } restore;
  return reinterpret_cast<Result (*)(const void*, Args...)>(function)(object, args...);
}

void Acquire(const void* object) { __tsan_acquire(const_cast<void*>(object)); }
void Release(const void* object) { __tsan_release(const_cast<void*>(object)); }

}  // namespace
}  // namespace certkv

namespace absl {
ABSL_NAMESPACE_BEGIN

using certkv::Acquire;
using certkv::CallLibrary;
using certkv::LibraryFunction;
using certkv::Release;

void Mutex::Lock() {
  static void* const function = LibraryFunction<Mutex>("4LockEv");
  CallLibrary<void>(function, this);
  Acquire(this);
}

void Mutex::Unlock() {
  static void* const function = LibraryFunction<Mutex>("6UnlockEv");
  Release(this);
  CallLibrary<void>(function, this);
}

bool Mutex::TryLock() {
  static void* const function = LibraryFunction<Mutex>("7TryLockEv");
  const bool locked = CallLibrary<bool>(function, this);
  if (locked) Acquire(this);
  return locked;
}

void Mutex::ReaderLock() {
  static void* const function = LibraryFunction<Mutex>("10ReaderLockEv");
  CallLibrary<void>(function, this);
  Acquire(this);
}

void Mutex::ReaderUnlock() {
  static void* const function = LibraryFunction<Mutex>("12ReaderUnlockEv");
  Release(this);
  CallLibrary<void>(function, this);
}

bool Mutex::ReaderTryLock() {
  static void* const function = LibraryFunction<Mutex>("13ReaderTryLockEv");
  const bool locked = CallLibrary<bool>(function, this);
  if (locked) Acquire(this);
  return locked;
}

void Mutex::LockWhen(const Condition& condition) {
  static void* const function = LibraryFunction<Mutex>("8LockWhenERKNS0_9ConditionE");
  CallLibrary<void>(function, this, &condition);
  Acquire(this);
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  static void* const function =
      LibraryFunction<Mutex>("19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  const bool met = CallLibrary<bool>(function, this, &condition, timeout);
  Acquire(this);
  return met;
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  static void* const function =
      LibraryFunction<Mutex>("20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  const bool met = CallLibrary<bool>(function, this, &condition, deadline);
  Acquire(this);
  return met;
}

void Mutex::ReaderLockWhen(const Condition& condition) {
  static void* const function = LibraryFunction<Mutex>("14ReaderLockWhenERKNS0_9ConditionE");
  CallLibrary<void>(function, this, &condition);
  Acquire(this);
}

void Mutex::Await(const Condition& condition) {
  static void* const function = LibraryFunction<Mutex>("5AwaitERKNS0_9ConditionE");
  Release(this);
  CallLibrary<void>(function, this, &condition);
  Acquire(this);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static void* const function =
      LibraryFunction<Mutex>("16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  Release(this);
  const bool met = CallLibrary<bool>(function, this, &condition, timeout);
  Acquire(this);
  return met;
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static void* const function =
      LibraryFunction<Mutex>("17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  Release(this);
  const bool met = CallLibrary<bool>(function, this, &condition, deadline);
  Acquire(this);
  return met;
}

void CondVar::Wait(Mutex* mutex) {
  static void* const function = LibraryFunction<CondVar>("4WaitEPNS0_5MutexE");
  Release(mutex);
  CallLibrary<void>(function, this, mutex);
  Acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static void* const function =
      LibraryFunction<CondVar>("15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  Release(mutex);
  const bool timed_out = CallLibrary<bool>(function, this, mutex, timeout);
  Acquire(mutex);
  return timed_out;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static void* const function =
      LibraryFunction<CondVar>("16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  Release(mutex);
  const bool timed_out = CallLibrary<bool>(function, this, mutex, deadline);
  Acquire(mutex);
  return timed_out;
}

void Notification::Notify() {
  static void* const function = LibraryFunction<Notification>("6NotifyEv");
  Release(this);
  CallLibrary<void>(function, this);
}

void Notification::WaitForNotification() const {
  static void* const function = LibraryFunction<Notification, true>("19WaitForNotificationEv");
  CallLibrary<void>(function, this);
  Acquire(this);
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  static void* const function =
      LibraryFunction<Notification, true>("30WaitForNotificationWithTimeoutENS0_8DurationE");
  const bool notified = CallLibrary<bool>(function, this, timeout);
  Acquire(this);
  return notified;
}

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  static void* const function =
      LibraryFunction<Notification, true>("31WaitForNotificationWithDeadlineENS0_4TimeE");
  const bool notified = CallLibrary<bool>(function, this, deadline);
  Acquire(this);
  return notified;
}

bool BlockingCounter::DecrementCount() {
  static void* const function = LibraryFunction<BlockingCounter>("14DecrementCountEv");
  Release(this);
  return CallLibrary<bool>(function, this);
}

void BlockingCounter::Wait() {
  static void* const function = LibraryFunction<BlockingCounter>("4WaitEv");
  CallLibrary<void>(function, this);
  Acquire(this);
}

ABSL_NAMESPACE_END
}  // namespace absl
