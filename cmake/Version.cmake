# Target `certkv_version`: which source and compiler a binary was made from.
#
#   #include "certkv/version.h"
#
# Only version.cc holds the values. It is rewritten at build time when the commit changed, so a
# commit recompiles one small file and relinks what depends on this target.

set(certkv_version_root "${CMAKE_BINARY_DIR}/generated/version")
configure_file(cmake/version.h.in "${certkv_version_root}/certkv/version.h" COPYONLY)
add_custom_target(
  certkv_version_update
  COMMAND "${CMAKE_COMMAND}" "-DINPUT=${CMAKE_SOURCE_DIR}/cmake/version.cc.in"
          "-DOUTPUT=${certkv_version_root}/version.cc" "-DSOURCE_DIR=${CMAKE_SOURCE_DIR}"
          "-DVERSION=${PROJECT_VERSION}" "-DBUILD_TYPE=${CMAKE_BUILD_TYPE}"
          "-DCOMPILER=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
          -P "${CMAKE_SOURCE_DIR}/cmake/WriteVersion.cmake"
  BYPRODUCTS "${certkv_version_root}/version.cc"
  COMMENT "Reading the commit"
  VERBATIM)
add_library(certkv_version STATIC "${certkv_version_root}/version.cc")
target_include_directories(certkv_version PUBLIC "${certkv_version_root}")
add_dependencies(certkv_version certkv_version_update)
