# Compiler settings that hold for every target.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_LINK_DEPENDS_NO_SHARED ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()
# -g1 keeps line numbers for stack traces at a quarter of the size and link time of -g.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_SANITIZE "-O1 -g1")

# For all, because a precompiled header serves only files that agree about -pthread.
add_compile_options(-Wall -Wextra -pthread)
if(CERTKV_WERROR)
  add_compile_options(-Werror)
endif()

# A bound holds for the roundings that the source states. The compiler may therefore neither
# contract a * b + c into one rounding (SIMD files ask for FMA by intrinsic) nor reorder sums.
add_compile_options(-ffp-contract=off)
if("${CMAKE_CXX_FLAGS} $ENV{CXXFLAGS}" MATCHES "-(Ofast|f(fast|unsafe)-math)")
  message(FATAL_ERROR "CXXFLAGS turn on value-changing floating point, which breaks the proven "
                      "bounds; remove '${CMAKE_MATCH_0}'")
endif()

if(CERTKV_SANITIZE)
  add_compile_options(-fsanitize=${CERTKV_SANITIZE} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${CERTKV_SANITIZE})
  if(CERTKV_SANITIZE STREQUAL "thread")
    # Asio's fences beside its locks; GCC refuses fences under ThreadSanitizer (-Werror=tsan).
    add_compile_definitions(BOOST_ASIO_DISABLE_FENCED_BLOCK)
  endif()
endif()

# Only instruments; what links a main of libFuzzer is in tests/fuzz.
if(CERTKV_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# Source paths in messages (__FILE__) are relative to the repository. ccache rewrites paths below
# its base directory to relative ones, so that build folders share one cache. Its depend mode takes
# the list of headers from the compiler, where else it preprocesses each file once more. Its manual
# asks for the sloppiness, and for -fpch-preprocess, where headers are precompiled.
find_program(CERTKV_CCACHE ccache)
if(CERTKV_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1
                                  CCACHE_DEPEND=1 CCACHE_SLOPPINESS=pch_defines,time_macros "${CERTKV_CCACHE}")
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  file(RELATIVE_PATH certkv_source_from_build "${CMAKE_BINARY_DIR}" "${CMAKE_SOURCE_DIR}")
  add_compile_options("-fmacro-prefix-map=${certkv_source_from_build}=")
else()
  add_compile_options("-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=")
endif()
