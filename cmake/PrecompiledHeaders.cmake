# Most of a small file's compile time is reading the standard library and Abseil, again for each
# file. Two precompiled headers do it once per build folder: `library` for all our code, `test` for
# what includes GoogleTest as well. Only headers of the system are in them, so that nothing of ours
# recompiles the world. Files still include what they use: `./dev lint` compiles and checks without
# them (preset lint). Only for GCC; the one build with Clang is for fuzzing and small.

include(CMakeDependentOption)
cmake_dependent_option(CERTKV_PRECOMPILE
                       "Precompile the headers of the standard library, Abseil and GoogleTest" ON
                       "CMAKE_CXX_COMPILER_ID STREQUAL GNU" OFF)

set(certkv_library_headers
    <algorithm> <array> <atomic> <chrono> <cmath> <cstdint> <cstring> <functional> <limits> <map>
    <memory> <optional> <string> <utility> <vector>
    <absl/container/flat_hash_map.h> <absl/container/flat_hash_set.h> <absl/status/status.h>
    <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/strings/str_format.h>
    <absl/strings/str_join.h> <absl/strings/string_view.h> <absl/synchronization/mutex.h>
    <absl/time/clock.h> <absl/time/time.h> <absl/types/span.h>)
set(certkv_test_headers <gmock/gmock.h> <gtest/gtest.h>)

if(CERTKV_PRECOMPILE)
  file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/precompiled/unit.cc" CONTENT "" @ONLY)
  foreach(kind IN ITEMS library test)
    set(headers ${certkv_library_headers})
    set(libraries absl::statusor absl::str_format absl::synchronization absl::time
                  absl::flat_hash_map absl::flat_hash_set absl::span)
    if(kind STREQUAL "test")
      list(APPEND headers ${certkv_test_headers})
      list(APPEND libraries GTest::gmock)
    endif()
    add_library(certkv_precompiled_${kind} OBJECT EXCLUDE_FROM_ALL
                "${CMAKE_BINARY_DIR}/precompiled/unit.cc")
    target_link_libraries(certkv_precompiled_${kind} PRIVATE ${libraries})
    target_precompile_headers(certkv_precompiled_${kind} PRIVATE ${headers})
  endforeach()
endif()

# certkv_use_precompiled_(TARGET library|test). A source with compiler flags of its own takes no
# part: set SKIP_PRECOMPILE_HEADERS on it.
function(certkv_use_precompiled_ target kind)
  if(CERTKV_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM certkv_precompiled_${kind})
  endif()
endfunction()
