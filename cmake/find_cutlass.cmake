# SDPA_CUTLASS_INCLUDE_DIRS: the CUTLASS headers, from SDPA_CUTLASS_DIR or the nvidia-cutlass package. The package is
# located, never imported: importing it parses the command line.
set(_cutlass ${SDPA_CUTLASS_DIR})
if(NOT _cutlass)
  sdpa_ask_python(_cutlass_package
    "import importlib.util; print(importlib.util.find_spec('cutlass_library').submodule_search_locations[0])")
  if(_cutlass_package)
    set(_cutlass ${_cutlass_package}/source)
  endif()
endif()
if(NOT EXISTS ${_cutlass}/include/cute/tensor.hpp)
  message(FATAL_ERROR "CUTLASS was not found: ${Python_EXECUTABLE} -m pip install nvidia-cutlass==4.2.0.0, "
                      "or pass -DSDPA_CUTLASS_DIR=/path/to/cutlass")
endif()
set(SDPA_CUTLASS_INCLUDE_DIRS ${_cutlass}/include ${_cutlass}/tools/util/include)

file(STRINGS ${_cutlass}/include/cutlass/version.h _cutlass_major REGEX "define CUTLASS_MAJOR +[0-9]+")
if(_cutlass_major MATCHES "MAJOR +([0-3])$")
  message(FATAL_ERROR "${_cutlass} is CUTLASS ${CMAKE_MATCH_1}; version 4 is needed: "
                      "${Python_EXECUTABLE} -m pip install nvidia-cutlass==4.2.0.0")
endif()
message(STATUS "CUTLASS: ${_cutlass}")
