# A part of `cmake --install` (cmake/Install.cmake): units and samples with the paths of this prefix,
# manual pages and completion from what the programs print. Environment DESTDIR is honoured.

if(CMAKE_INSTALL_PREFIX STREQUAL "/usr")
  set(config_directory /etc/certkv)
else()
  set(config_directory "${CMAKE_INSTALL_PREFIX}/etc/certkv")
endif()

# Of this installation alone: two may run at once.
string(MD5 key "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}")
string(APPEND certkv_work "/${key}")

# A unit names programs, documents and config by their whole paths.
file(GLOB units "${certkv_source}/deploy/systemd/*.service")
foreach(unit IN LISTS units)
  file(READ "${unit}" text)
  string(REPLACE "=/usr/bin/" "=${CMAKE_INSTALL_PREFIX}/bin/" text "${text}")
  string(REPLACE "file:///usr/" "file://${CMAKE_INSTALL_PREFIX}/" text "${text}")
  string(REPLACE "/etc/certkv/" "${config_directory}/" text "${text}")
  get_filename_component(name "${unit}" NAME)
  file(WRITE "${certkv_work}/${name}" "${text}")
  file(INSTALL "${certkv_work}/${name}" DESTINATION "${CMAKE_INSTALL_PREFIX}/lib/systemd/system")
endforeach()

# A config that someone has changed stays.
file(GLOB samples "${certkv_source}/deploy/config/*.yaml")
foreach(sample IN LISTS samples)
  get_filename_component(name "${sample}" NAME)
  if(EXISTS "$ENV{DESTDIR}${config_directory}/${name}")
    message(STATUS "Kept: $ENV{DESTDIR}${config_directory}/${name}")
  else()
    file(INSTALL "${sample}" DESTINATION "${config_directory}")
  endif()
endforeach()

# run(OUT ARGUMENT...): what a program prints; default paths in it are those of no user in particular.
function(run out program)
  execute_process(COMMAND "${CMAKE_COMMAND}" -E env "CERTKV_RUNTIME_DIR=\$CERTKV_RUNTIME_DIR"
                          "${certkv_program_directory}/${program}" ${ARGN}
                  OUTPUT_VARIABLE text RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${certkv_program_directory}/${program} ${ARGN} ended with ${result}; build it first")
  endif()
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# Text as roff prints it unchanged.
function(to_roff out text)
  string(REPLACE "\\" "\\e" text "${text}")
  string(REPLACE "-" "\\-" text "${text}")
  string(REGEX REPLACE "(^|\n)([.'])" "\\1\\\\&\\2" text "${text}")
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# add_help(OUT TITLE PROGRAM [SUBCOMMAND...]): a section with its --help, then one of each subcommand.
function(add_help out title)
  run(help ${ARGN} --help)
  to_roff(text "${help}")
  to_roff(title_text "${title}")
  set(page "${${out}}.SH \"${title_text}\"\n.nf\n${text}.fi\n")
  if(help MATCHES "\nSubcommands:\n(.*)$")
    string(REPLACE ";" "," subcommands "${CMAKE_MATCH_1}")  # which would end an element of a list
    string(REGEX MATCHALL "  [a-z]+  +[^\n]+" lines "${subcommands}")
    foreach(line IN LISTS lines)
      string(REGEX MATCH "[a-z]+" name "${line}")
      if("${title} ${name}" STREQUAL "certkv trace record")
        continue()  # its help is the Python package's, which need not be there
      endif()
      add_help(page "${title} ${name}" ${ARGN} ${name})
    endforeach()
  endif()
  set(${out} "${page}" PARENT_SCOPE)
endfunction()

# install_page(PROGRAM SECTION)
function(install_page program section)
  run(help ${program} --help)
  # The first line that is not of the usage.
  string(REGEX REPLACE "^usage: [^\n]+\n\n" "" summary "${help}")
  string(REGEX REPLACE "\n.*" "" summary "${summary}")
  to_roff(summary "${summary}")
  to_roff(name "${program}")
  set(page ".TH ${program} ${section} \"\" \"CertKV ${certkv_version}\" \"CertKV\"\n.SH NAME\n${name} \\- ${summary}\n")
  add_help(page "${program}" ${program})
  file(WRITE "${certkv_work}/${program}.${section}" "${page}")
  file(INSTALL "${certkv_work}/${program}.${section}"
       DESTINATION "${CMAKE_INSTALL_PREFIX}/share/man/man${section}")
endfunction()

install_page(certkv 1)
foreach(program IN ITEMS certkv-certifier certkv-gate certkv-kvstore certkvd)
  install_page(${program} 8)
endforeach()

run(completion certkv completion)
file(WRITE "${certkv_work}/completion/certkv" "${completion}")
file(INSTALL "${certkv_work}/completion/certkv"
     DESTINATION "${CMAKE_INSTALL_PREFIX}/share/bash-completion/completions")
file(REMOVE_RECURSE "${certkv_work}")
