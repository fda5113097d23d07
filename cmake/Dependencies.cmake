# Libraries CertKV is built on (Debian 12's packages; `./dev` installs them).
# After this file: absl::*, gRPC::grpc++, gRPC::grpc++_reflection, protobuf::libprotobuf,
# Boost::headers, Boost::context, CLI11::CLI11, yaml-cpp, nlohmann_json::nlohmann_json, OpenSSL::Crypto, OpenSSL::SSL,
# RocksDB::rocksdb, hiredis::hiredis, prometheus::core, xxhash::xxhash, Threads::Threads,
# GTest::gmock_main, benchmark::benchmark.

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(OpenSSL 3.0 REQUIRED)
find_package(Protobuf 3.21 REQUIRED)
find_package(Boost 1.74 REQUIRED COMPONENTS context)
find_package(yaml-cpp CONFIG REQUIRED)
find_package(nlohmann_json 3.11 CONFIG REQUIRED)
find_package(CLI11 2.1 CONFIG REQUIRED)
find_package(GTest CONFIG REQUIRED)
find_package(benchmark CONFIG REQUIRED)

pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
add_library(xxhash::xxhash ALIAS PkgConfig::XXHASH)

pkg_check_modules(ROCKSDB REQUIRED IMPORTED_TARGET rocksdb>=7.8)
add_library(RocksDB::rocksdb ALIAS PkgConfig::ROCKSDB)

# Not by pkg-config, whose flags (_FILE_OFFSET_BITS) would keep precompiled headers from being used.
find_path(CERTKV_HIREDIS_INCLUDE hiredis/hiredis.h REQUIRED)
find_library(CERTKV_HIREDIS_LIBRARY hiredis REQUIRED)
mark_as_advanced(CERTKV_HIREDIS_INCLUDE CERTKV_HIREDIS_LIBRARY)
add_library(hiredis::hiredis INTERFACE IMPORTED)
target_include_directories(hiredis::hiredis INTERFACE "${CERTKV_HIREDIS_INCLUDE}")
target_link_libraries(hiredis::hiredis INTERFACE "${CERTKV_HIREDIS_LIBRARY}")

# Only its data model and text format: no HTTP server, no push.
pkg_check_modules(PROMETHEUS_CPP REQUIRED IMPORTED_TARGET prometheus-cpp-core>=1.0)
add_library(prometheus::core ALIAS PkgConfig::PROMETHEUS_CPP)

find_package(gRPC CONFIG QUIET)
if(gRPC_FOUND)
  set(certkv_grpc_version "${gRPC_VERSION}")
else()
  pkg_check_modules(GRPCPP REQUIRED IMPORTED_TARGET grpc++)
  set(certkv_grpc_version "${GRPCPP_VERSION} (pkg-config)")
  find_library(CERTKV_GRPCPP_REFLECTION grpc++_reflection REQUIRED)
  add_library(gRPC::grpc++ ALIAS PkgConfig::GRPCPP)
  add_library(gRPC::grpc++_reflection INTERFACE IMPORTED)
  target_link_libraries(gRPC::grpc++_reflection INTERFACE "${CERTKV_GRPCPP_REFLECTION}"
                                                          PkgConfig::GRPCPP)
endif()
find_program(CERTKV_GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)

# CUDA and NCCL are looked for; nothing needs them. Where nvcc runs, kernels/cuda is compiled for GPUs
# (cmake/Cuda.cmake); tests execute it on CPU threads everywhere.
find_program(CERTKV_NVCC nvcc HINTS "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
set(certkv_cuda_summary "not found: kernels/cuda isn't compiled for GPUs (not needed)")
set(certkv_has_nvcc OFF)
if(CERTKV_NVCC)
  execute_process(COMMAND "${CERTKV_NVCC}" --version OUTPUT_VARIABLE certkv_nvcc_text
                  ERROR_QUIET RESULT_VARIABLE certkv_nvcc_result)
  if(certkv_nvcc_result EQUAL 0 AND certkv_nvcc_text MATCHES "release [0-9.]+, V([0-9.]+)")
    set(certkv_cuda_summary "${CMAKE_MATCH_1}, ${CERTKV_NVCC}")
    # Sanitizers look at the execution on CPU threads.
    if(NOT CERTKV_SANITIZE)
      set(certkv_has_nvcc ON)
    endif()
  else()
    set(certkv_cuda_summary "${CERTKV_NVCC} does not run (not needed)")
  endif()
endif()
find_path(CERTKV_NCCL_INCLUDE nccl.h HINTS "$ENV{CUDA_HOME}/include" /usr/local/cuda/include)
find_library(CERTKV_NCCL_LIBRARY nccl HINTS "$ENV{CUDA_HOME}/lib64" /usr/local/cuda/lib64)
# nccl.h includes CUDA's headers.
find_path(CERTKV_CUDA_INCLUDE cuda_runtime.h HINTS "$ENV{CUDA_HOME}/include" /usr/local/cuda/include)
set(certkv_nccl_summary "not found (not needed)")
if(CERTKV_NCCL_LIBRARY)
  set(certkv_nccl_summary "${CERTKV_NCCL_LIBRARY} (opened by tests; programs look for libnccl.so.2)")
endif()
set(certkv_has_nccl_header OFF)
if(CERTKV_NCCL_INCLUDE AND CERTKV_CUDA_INCLUDE)
  set(certkv_has_nccl_header ON)
endif()
mark_as_advanced(CERTKV_CCACHE CERTKV_CUDA_INCLUDE CERTKV_GRPC_CPP_PLUGIN CERTKV_NVCC CERTKV_NCCL_INCLUDE
                 CERTKV_NCCL_LIBRARY)
