# The helpers every folder's CMakeLists.txt is written with:
#
#   certkv_library(kernels_bounds SOURCES a.cc HEADERS a.h DEPS kernels_core absl::status)
#   certkv_test(bounds_test SOURCES a_test.cc DEPS kernels_bounds [LABELS unit] [TIMEOUT 120])
#   certkv_proto(proto_kvstore GRPC PROTOS certkv/kvstore/v1/kvstore.proto DEPS proto_type)
#   certkv_binary(certkv-gate SOURCES main.cc DEPS services_gate)
#
# COLD after a name is for code that waits for a wire, a file or a person: it is compiled with -O1,
# a quarter faster. What reads or decides for every token (kernels, bounds, engines) never is COLD.
#
# Lists are written by hand and sorted. Includes start at the repository root.

include(GoogleTest)

function(certkv_parse_ prefix options one_value multi_value)
  cmake_parse_arguments(PARSED "${options}" "${one_value}" "${multi_value}" ${ARGN})
  if(PARSED_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "${prefix}: unknown arguments '${PARSED_UNPARSED_ARGUMENTS}'; "
                        "known are ${options} ${one_value} ${multi_value}")
  endif()
  certkv_require_files_(${PARSED_SOURCES} ${PARSED_HEADERS})
  foreach(name IN LISTS options one_value multi_value)
    set(ARG_${name} "${PARSED_${name}}" PARENT_SCOPE)
  endforeach()
endfunction()

# A file that is listed but missing would be an error of ninja at best, so it is one here.
function(certkv_require_files_)
  foreach(file IN LISTS ARGN)
    if(NOT IS_ABSOLUTE "${file}" AND NOT EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
      message(FATAL_ERROR "${CMAKE_CURRENT_SOURCE_DIR}/${file} is listed in CMakeLists.txt but "
                          "missing; write it or drop the line")
    endif()
  endforeach()
endfunction()

# Compiles each header alone, as part of target `check_headers` (`./dev lint`).
function(certkv_check_headers_ target)
  if(NOT ARGN)
    return()
  endif()
  set(units)
  foreach(header IN LISTS ARGN)
    file(RELATIVE_PATH path "${CMAKE_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}/${header}")
    set(unit "${CMAKE_BINARY_DIR}/check_headers/${path}.cc")
    file(CONFIGURE OUTPUT "${unit}" CONTENT "#include \"${path}\"\n" @ONLY)
    list(APPEND units "${unit}")
  endforeach()
  add_library(${target}_header_check OBJECT EXCLUDE_FROM_ALL ${units})
  target_link_libraries(${target}_header_check PRIVATE ${target})
  target_compile_options(${target}_header_check PRIVATE -O0 -g0)
  set_property(GLOBAL APPEND PROPERTY CERTKV_HEADER_TARGETS ${target}_header_check)
endfunction()

# Under ThreadSanitizer every program brings what makes Abseil's locks visible to it; under
# AddressSanitizer, which leaks are not ours.
function(certkv_link_program_ target)
  if(CERTKV_SANITIZE MATCHES "address")
    if(NOT TARGET certkv_lsan)
      add_library(certkv_lsan OBJECT "${CMAKE_SOURCE_DIR}/cmake/lsan_suppressions.cc")
    endif()
    target_link_libraries(${target} PRIVATE certkv_lsan)
  endif()
  if(NOT CERTKV_SANITIZE STREQUAL "thread")
    return()
  endif()
  if(NOT TARGET certkv_tsan_abseil)
    add_library(certkv_tsan_abseil OBJECT "${CMAKE_SOURCE_DIR}/cmake/tsan_abseil.cc")
    target_link_libraries(certkv_tsan_abseil PUBLIC absl::synchronization)
  endif()
  target_link_libraries(${target} PRIVATE certkv_tsan_abseil)
endfunction()

# What COLD does.
macro(certkv_optimize_less_ target)
  if(ARG_COLD AND CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")
    target_compile_options(${target} PRIVATE -O1)
  endif()
endmacro()

# A static library; an interface library when it has no SOURCES. DEPS are public.
function(certkv_library target)
  certkv_parse_("certkv_library(${target})" "COLD" "" "SOURCES;HEADERS;DEPS" ${ARGN})
  if(ARG_SOURCES)
    add_library(${target} STATIC ${ARG_SOURCES} ${ARG_HEADERS})
    certkv_use_precompiled_(${target} library)
    certkv_optimize_less_(${target})
    set(scope PUBLIC)
  else()
    add_library(${target} INTERFACE ${ARG_HEADERS})
    set(scope INTERFACE)
  endif()
  target_include_directories(${target} ${scope} "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${target} ${scope} ${ARG_DEPS})
  certkv_check_headers_(${target} ${ARG_HEADERS})
endfunction()

# An executable in <build>/bin.
function(certkv_binary target)
  certkv_parse_("certkv_binary(${target})" "COLD" "" "SOURCES;HEADERS;DEPS" ${ARGN})
  if(NOT ARG_SOURCES)
    message(FATAL_ERROR "${target} has no SOURCES")
  endif()
  add_executable(${target} ${ARG_SOURCES} ${ARG_HEADERS})
  certkv_use_precompiled_(${target} library)
  certkv_optimize_less_(${target})
  target_include_directories(${target} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE ${ARG_DEPS})
  certkv_link_program_(${target})
endfunction()

# A GoogleTest program in <build>/test_bin, each of its tests registered with ctest.
# Tests run with the repository root as working directory. TIMEOUT is in seconds, for one test, and
# five times as long under sanitizers, which slow the arithmetic by 5 to 20;
# LABELS takes one label (gtest_discover_tests keeps only the first of a list).
function(certkv_test target)
  certkv_parse_("certkv_test(${target})" "" "TIMEOUT;LABELS" "SOURCES;HEADERS;DEPS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(CERTKV_SANITIZE)
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_SOURCES)
    message(FATAL_ERROR "${target} has no SOURCES")
  endif()
  add_executable(${target} ${ARG_SOURCES} ${ARG_HEADERS})
  certkv_use_precompiled_(${target} test)
  set_target_properties(${target} PROPERTIES
                        RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/test_bin")
  target_include_directories(${target} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE ${ARG_DEPS} GTest::gmock_main)
  certkv_link_program_(${target})
  set(environment "UBSAN_OPTIONS=print_stacktrace=1")
  if(CERTKV_SANITIZE STREQUAL "thread")
    set(environment
        "TSAN_OPTIONS=ignore_noninstrumented_modules=1 suppressions=${CMAKE_SOURCE_DIR}/cmake/tsan_suppressions.txt")
  endif()
  gtest_discover_tests(${target}
                       DISCOVERY_MODE PRE_TEST
                       DISCOVERY_TIMEOUT 60
                       WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
                       PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
                                  ENVIRONMENT "${environment}")
endfunction()

# A library of generated code; PROTOS are relative to proto/, and so are the includes:
# #include "certkv/kvstore/v1/kvstore.pb.h". GRPC adds the services (kvstore.grpc.pb.h).
function(certkv_proto target)
  certkv_parse_("certkv_proto(${target})" "GRPC" "" "PROTOS;DEPS" ${ARGN})
  set(proto_root "${CMAKE_SOURCE_DIR}/proto")
  set(generated_root "${CMAKE_BINARY_DIR}/generated/proto")
  file(MAKE_DIRECTORY "${generated_root}")
  set(sources)
  foreach(proto IN LISTS ARG_PROTOS)
    string(REGEX REPLACE "\\.proto$" "" stem "${proto}")
    set(outputs "${generated_root}/${stem}.pb.cc" "${generated_root}/${stem}.pb.h")
    set(grpc_arguments)
    if(ARG_GRPC)
      # First in the list, because ninja compares the first output with the depfile's first.
      list(PREPEND outputs "${generated_root}/${stem}.grpc.pb.cc"
                           "${generated_root}/${stem}.grpc.pb.h")
      set(grpc_arguments "--grpc_out=generate_mock_code=false:${generated_root}"
                         "--plugin=protoc-gen-grpc=${CERTKV_GRPC_CPP_PLUGIN}")
    endif()
    # The depfile makes an edit of an imported .proto regenerate this one.
    set(depfile "${generated_root}/${stem}.pb.d")
    get_filename_component(folder "${depfile}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    add_custom_command(
      OUTPUT ${outputs}
      COMMAND protobuf::protoc "--proto_path=${proto_root}" "--cpp_out=${generated_root}"
              ${grpc_arguments} "--dependency_out=${depfile}" "${proto_root}/${proto}"
      DEPENDS "${proto_root}/${proto}" protobuf::protoc
      DEPFILE "${depfile}"
      COMMENT "protoc ${proto}"
      VERBATIM)
    list(APPEND sources ${outputs})
  endforeach()
  add_library(${target} STATIC ${sources})
  target_include_directories(${target} SYSTEM PUBLIC "${generated_root}")
  target_compile_options(${target} PRIVATE -w -O1 -g0)
  if(CERTKV_SANITIZE MATCHES "address")
    # protoc's code is not ours to check, and its instrumentation is most of an asan build's time.
    # Under thread it stays, because its atomics order our accesses.
    target_compile_options(${target} PRIVATE -fno-sanitize=all)
  endif()
  target_link_libraries(${target} PUBLIC ${ARG_DEPS} protobuf::libprotobuf)
  if(ARG_GRPC)
    target_link_libraries(${target} PUBLIC gRPC::grpc++)
  endif()
endfunction()

# Writes OUTPUT, a source file below the build folder that defines, in NAMESPACE,
#   absl::string_view FUNCTION(absl::string_view path)
# the bytes of one of the files given (relative to this folder), or "".
function(certkv_embed_files output namespace function)
  set(sources)
  foreach(file IN LISTS ARGN)
    list(APPEND sources "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
  endforeach()
  add_custom_command(
    OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/${output}"
    COMMAND "${CMAKE_COMMAND}" "-DOUTPUT=${CMAKE_CURRENT_BINARY_DIR}/${output}"
            "-DROOT=${CMAKE_CURRENT_SOURCE_DIR}" "-DFILES=${ARGN}" "-DNAMESPACE=${namespace}"
            "-DFUNCTION=${function}" -P "${CMAKE_SOURCE_DIR}/cmake/EmbedFiles.cmake"
    DEPENDS ${sources} "${CMAKE_SOURCE_DIR}/cmake/EmbedFiles.cmake"
    COMMENT "Embedding ${output}"
    VERBATIM)
endfunction()

# Called once, after all folders: the collecting targets and the summary.
function(certkv_finish)
  get_property(header_targets GLOBAL PROPERTY CERTKV_HEADER_TARGETS)
  add_custom_target(check_headers)
  if(header_targets)
    add_dependencies(check_headers ${header_targets})
  endif()
  string(CONCAT summary
         "CertKV ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}\n"
         "   compiler   ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\n"
         "   sanitizers ${CERTKV_SANITIZE}\n"
         "   ccache     ${CERTKV_CCACHE}\n"
         "   gRPC       ${certkv_grpc_version}, Protobuf ${Protobuf_VERSION}\n"
         "   Abseil     ${absl_VERSION}, Boost ${Boost_VERSION}\n"
         "   CUDA       ${certkv_cuda_summary}\n"
         "   NCCL       ${certkv_nccl_summary}")
  message(STATUS "${summary}")
endfunction()
