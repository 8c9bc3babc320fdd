# Runs the generator when CMake configures, and has CMake configure again whenever the generator or a template
# changes. The generator rewrites only files whose text changed, so an unchanged unit is not compiled again.
#   SDPA_GENERATED_DIR     where the text lies; both libraries share it
#   SDPA_GENERATED_SETS    names of sets of units; from the folder's sources.cmake, like
#   SDPA_UNITS_<set>       its units, relative to the folder, and
#   SDPA_ARCHS_<set>       the GPU architectures that they are for
if(SKBUILD OR SDPA_FILTER OR SDPA_FAMILIES)
  set(_generated_dir ${CMAKE_BINARY_DIR}/generated)
elseif(SDPA_SPACE STREQUAL "release")
  set(_generated_dir ${CMAKE_SOURCE_DIR}/build/generated)
else()
  set(_generated_dir ${CMAKE_SOURCE_DIR}/build/generated-${SDPA_SPACE})
endif()
set(SDPA_GENERATED_DIR ${_generated_dir})

set(_command ${Python_EXECUTABLE} -m generator --out ${SDPA_GENERATED_DIR} --space ${SDPA_SPACE})
if(SDPA_FILTER)
  list(APPEND _command --filter ${SDPA_FILTER})
endif()
if(SDPA_FAMILIES)
  list(JOIN SDPA_FAMILIES "," _families)
  list(APPEND _command --families ${_families})
endif()
execute_process(COMMAND ${_command} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} RESULT_VARIABLE _result
                OUTPUT_VARIABLE _output ERROR_VARIABLE _output OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT _result EQUAL 0)
  message(FATAL_ERROR "The generator failed:\n${_output}")
endif()
message(STATUS "Generator: ${_output}")
include(${SDPA_GENERATED_DIR}/sources.cmake)

file(GLOB_RECURSE _inputs CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/generator/*.py ${CMAKE_SOURCE_DIR}/templates/*)
set_property(DIRECTORY ${CMAKE_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${_inputs})
