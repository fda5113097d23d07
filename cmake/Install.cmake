# What `cmake --install build/release --prefix PREFIX` puts where, and the Debian packages of the same
# files, one for each component:
#   cpack --config build/release/CPackConfig.cmake -B build/package
# Nothing is compiled for it: everything is relocatable.
#
# Component certkv, package certkv:
#   bin/                          certkv, certkvd, certkv-kvstore, certkv-certifier, certkv-gate
#   etc/certkv/                   the samples of deploy/config; /etc/certkv where PREFIX is /usr
#   lib/systemd/system/           units; lib/sysusers.d and lib/tmpfiles.d what they need
#   share/man, share/bash-completion   made from what the programs say of themselves
#   share/certkv/                 make-certificates, Prometheus rules, the Grafana dashboard
#   share/doc/certkv/             documents and license
# Component library, package libcertkv1:
#   lib/                          libcertkv.so.1
# Component development, package libcertkv-dev:
#   include/certkv/certkv.h, lib/libcertkv.so, lib/cmake/certkv, lib/pkgconfig/certkv.pc
#   share/doc/libcertkv-dev/example     a C program and its CMakeLists.txt

if(SKBUILD OR CERTKV_SANITIZE OR CERTKV_FUZZ)
  return()  # of the Python client, or not for users
endif()

set(certkv_programs certkv certkv-certifier certkv-gate certkv-kvstore certkvd)
install(TARGETS ${certkv_programs} RUNTIME DESTINATION bin COMPONENT certkv)
install(FILES deploy/systemd/certkv.sysusers.conf DESTINATION lib/sysusers.d RENAME certkv.conf
        COMPONENT certkv)
install(FILES deploy/systemd/certkv.tmpfiles.conf DESTINATION lib/tmpfiles.d RENAME certkv.conf
        COMPONENT certkv)
install(PROGRAMS deploy/tls/make-certificates DESTINATION share/certkv COMPONENT certkv)
install(DIRECTORY deploy/grafana deploy/prometheus DESTINATION share/certkv COMPONENT certkv)
install(DIRECTORY docs/ DESTINATION share/doc/certkv COMPONENT certkv FILES_MATCHING PATTERN "*.md"
                                                                       PATTERN "*.svg")
install(FILES LICENSE DESTINATION share/doc/certkv RENAME copyright COMPONENT certkv)

# The rest depends on the prefix, or is made by running the programs.
install(CODE "set(certkv_source \"${CMAKE_SOURCE_DIR}\")
set(certkv_work \"${CMAKE_BINARY_DIR}/install\")
set(certkv_version \"${PROJECT_VERSION}\")
set(certkv_program_directory \"$<TARGET_FILE_DIR:certkvd>\")" COMPONENT certkv)
install(SCRIPT cmake/InstallFiles.cmake COMPONENT certkv)

# The C client.
install(TARGETS certkv_c EXPORT certkvTargets LIBRARY DESTINATION lib COMPONENT library
        NAMELINK_COMPONENT development)
target_include_directories(certkv_c INTERFACE $<INSTALL_INTERFACE:include>)
install(FILES LICENSE DESTINATION share/doc/libcertkv1 RENAME copyright COMPONENT library)
install(FILES clients/c/certkv.h DESTINATION include/certkv COMPONENT development)
install(EXPORT certkvTargets NAMESPACE certkv:: DESTINATION lib/cmake/certkv COMPONENT development)
include(CMakePackageConfigHelpers)
set(certkv_package "${CMAKE_BINARY_DIR}/package_config")
configure_package_config_file(cmake/certkvConfig.cmake.in "${certkv_package}/certkvConfig.cmake"
                              INSTALL_DESTINATION lib/cmake/certkv NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${certkv_package}/certkvConfigVersion.cmake"
                                 COMPATIBILITY SameMajorVersion)
configure_file(cmake/certkv.pc.in "${certkv_package}/certkv.pc" @ONLY)
install(FILES "${certkv_package}/certkvConfig.cmake" "${certkv_package}/certkvConfigVersion.cmake"
        DESTINATION lib/cmake/certkv COMPONENT development)
install(FILES "${certkv_package}/certkv.pc" DESTINATION lib/pkgconfig COMPONENT development)
install(DIRECTORY clients/c/example DESTINATION share/doc/libcertkv-dev COMPONENT development)
install(FILES LICENSE DESTINATION share/doc/libcertkv-dev RENAME copyright COMPONENT development)

# The Debian packages.
set(CPACK_GENERATOR DEB)
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};CertKV;ALL;/")
set(CPACK_COMPONENTS_ALL certkv library development)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_NAME certkv)
set(CPACK_PACKAGE_VENDOR CertKV)
set(CPACK_PACKAGE_CONTACT "CertKV developers <certkv@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "certified, quantized KV cache for LLM serving")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_CERTKV_PACKAGE_NAME certkv)
set(CPACK_DEBIAN_CERTKV_PACKAGE_SECTION net)
# Both make the user and /run/certkv in postinst; an image without systemd has the standalone ones.
set(CPACK_DEBIAN_CERTKV_PACKAGE_DEPENDS
    "systemd | systemd-standalone-sysusers, systemd | systemd-standalone-tmpfiles")
set(CPACK_DEBIAN_CERTKV_PACKAGE_SUGGESTS "etcd-server, openssl, prometheus, redis-server")
set(CPACK_DEBIAN_CERTKV_DESCRIPTION "A shared, quantized KV cache in which every attention read carries a proven bound on
what quantization changed, and a read whose bound is too large is repaired from originals.
No server is started by the installation: enable certkvd, or certkv-kvstore,
certkv-certifier and certkv-gate, when /etc/certkv says what they may use.")
set(CPACK_DEBIAN_CERTKV_PACKAGE_CONTROL_EXTRA
    "${CMAKE_SOURCE_DIR}/deploy/debian/conffiles" "${CMAKE_SOURCE_DIR}/deploy/debian/postinst"
    "${CMAKE_SOURCE_DIR}/deploy/debian/postrm" "${CMAKE_SOURCE_DIR}/deploy/debian/prerm")

set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME libcertkv1)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_LIBRARY_DESCRIPTION "The client library: the C interface by which engines put keys and values,
and read attention with certificates.")

set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libcertkv-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libcertkv1 (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_DEVELOPMENT_DESCRIPTION "The client library's header for programs in C or C++, files for CMake's
find_package and pkg-config, and an example.")
include(CPack)
