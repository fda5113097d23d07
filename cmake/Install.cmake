# What `cmake --install build/release --component certkv --prefix PREFIX` puts where, and the Debian
# package of the same files:
#   cpack --config build/release/CPackConfig.cmake -B build/package
# Nothing is compiled for it: programs are relocatable.
#
#   bin/                          certkv, certkvd, certkv-kvstore, certkv-certifier, certkv-gate
#   etc/certkv/                   the samples of deploy/config; /etc/certkv where PREFIX is /usr
#   lib/systemd/system/           units; lib/sysusers.d and lib/tmpfiles.d what they need
#   share/man, share/bash-completion   made from what the programs say of themselves
#   share/certkv/                 make-certificates, Prometheus rules, the Grafana dashboard
#   share/doc/certkv/             documents and license

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

# The Debian package.
set(CPACK_GENERATOR DEB)
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};CertKV;certkv;/")
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_NAME certkv)
set(CPACK_PACKAGE_VENDOR CertKV)
set(CPACK_PACKAGE_CONTACT "CertKV developers <certkv@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "certified, quantized KV cache for LLM serving")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# Both make the user and /run/certkv in postinst; an image without systemd has the standalone ones.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "systemd | systemd-standalone-sysusers, systemd | systemd-standalone-tmpfiles")
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "etcd-server, openssl, prometheus, redis-server")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "A shared, quantized KV cache in which every attention read carries a proven bound on
what quantization changed, and a read whose bound is too large is repaired from originals.
No server is started by the installation: enable certkvd, or certkv-kvstore,
certkv-certifier and certkv-gate, when /etc/certkv says what they may use.")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
    "${CMAKE_SOURCE_DIR}/deploy/debian/conffiles" "${CMAKE_SOURCE_DIR}/deploy/debian/postinst"
    "${CMAKE_SOURCE_DIR}/deploy/debian/postrm" "${CMAKE_SOURCE_DIR}/deploy/debian/prerm")
include(CPack)
