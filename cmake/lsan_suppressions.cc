// Linked into every program under AddressSanitizer: leaks that are not ours.
// c-ares, which gRPC resolves names with, frees its copy of the system's configuration only when
// the process calls ares_library_cleanup, which gRPC leaves to its own count of users.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libcares.so\n"; }
