# certkv_cuda_library(TARGET SOURCES a.cu b.cu DEPS ...): a static library that nvcc compiles, where
# certkv_has_nvcc. Programs that link it run on machines without a GPU or driver as well: the CUDA
# runtime is linked statically and looks for the driver (libcuda) when it is first called.
#
# nvcc is called as it is, not by CMake's own CUDA language, whose version 3.25 knows neither C++20 nor
# this CUDA, and which would give nvcc the options that are meant for the C++ compiler.

# A100; H100 and H200; B200. PTX of the last, so that later ones can run it too.
set(certkv_cuda_architectures
    -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a
    -gencode=arch=compute_100,code=[sm_100,compute_100])
# What a bound is computed from rounds as the source says: no contraction, subnormals kept, division
# and root correctly rounded. --use_fast_math would undo all four.
set(certkv_cuda_options
    -std=c++20 -O3 -DNDEBUG --expt-relaxed-constexpr
    -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
    -Xcompiler=-Wall,-Wextra,-ffp-contract=off -Xptxas=-v)

function(certkv_cuda_library target)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  set(objects)
  foreach(source IN LISTS ARG_SOURCES)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/${source}.o")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND ${CERTKV_CCACHE} "${CERTKV_NVCC}" ${certkv_cuda_options} ${certkv_cuda_architectures}
              "-I${CMAKE_SOURCE_DIR}" -MD -MF "${object}.d" -c "${CMAKE_CURRENT_SOURCE_DIR}/${source}"
              -o "${object}" > "${object}.ptxas" 2>&1 || (cat "${object}.ptxas" && false)
      DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${source}"
      DEPFILE "${object}.d"
      COMMENT "nvcc ${source}")
    list(APPEND objects "${object}")
  endforeach()
  get_filename_component(root "${CERTKV_NVCC}" REALPATH)
  get_filename_component(root "${root}" DIRECTORY)
  get_filename_component(root "${root}" DIRECTORY)
  find_library(CERTKV_CUDART cudart_static HINTS "${root}/lib64" "${root}/lib"
               "${root}/targets/x86_64-linux/lib" REQUIRED)
  mark_as_advanced(CERTKV_CUDART)
  add_library(${target} STATIC ${objects})
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  target_include_directories(${target} PUBLIC "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${target} PUBLIC ${ARG_DEPS} "${CERTKV_CUDART}" Threads::Threads dl rt)
endfunction()
