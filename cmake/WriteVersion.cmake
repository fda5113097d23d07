# Run at build time by Version.cmake: fills version.cc.in; leaves the file alone when nothing changed.
find_program(GIT git)
set(COMMIT "unknown")
if(GIT)
  execute_process(COMMAND "${GIT}" -C "${SOURCE_DIR}" describe --always --abbrev=12 --dirty
                                   --exclude=*
                  OUTPUT_VARIABLE text OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
                  RESULT_VARIABLE result)
  if(result EQUAL 0)
    set(COMMIT "${text}")
  endif()
endif()
configure_file("${INPUT}" "${OUTPUT}" @ONLY)
