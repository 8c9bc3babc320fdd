# The CUDA toolkit. For the CUDA library this chooses nvcc before CMake looks for one: CMAKE_CUDA_COMPILER, CUDACXX,
# an nvcc on PATH that is new enough, the toolkit that pip installed, /usr/local/cuda. The host library needs headers
# only (vector types, __half): SDPA_CUDA_INCLUDE_DIRS.
# find_package(CUDAToolkit) is not used: it wants an unversioned libcudart.so, which the packages do not have.
set(SDPA_CUDA_MINIMUM 12.4)
set(_install_hint "${Python_EXECUTABLE} -m pip install 'cuda-toolkit[nvcc,cccl]==13.0.*'")

# Looked for on sys.path, because an isolated build has its requirements beside the environment that runs it.
sdpa_ask_python(_packaged_cuda "
from importlib.util import find_spec
from pathlib import Path
roots = (Path(place, 'cu13') for place in find_spec('nvidia').submodule_search_locations)
print(next(str(root) for root in roots if (root / 'include/cuda_runtime_api.h').exists()))
")

# The first nvcc that exists and is new enough: on PATH, packaged, in the usual place. Empty when there is none.
function(sdpa_find_nvcc result)
  find_program(on_path nvcc PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
  set(${result} "" PARENT_SCOPE)
  foreach(nvcc IN ITEMS ${on_path} ${_packaged_cuda}/bin/nvcc /usr/local/cuda/bin/nvcc)
    if(NOT EXISTS ${nvcc})
      continue()
    endif()
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_QUIET)
    if(text MATCHES "release ([0-9]+\\.[0-9]+)" AND CMAKE_MATCH_1 VERSION_GREATER_EQUAL SDPA_CUDA_MINIMUM)
      set(${result} ${nvcc} PARENT_SCOPE)
      return()
    endif()
    message(STATUS "${nvcc} is not used: release '${CMAKE_MATCH_1}', ${SDPA_CUDA_MINIMUM} is needed")
  endforeach()
endfunction()

if(cuda IN_LIST SDPA_TARGET)
  set(CMAKE_CUDA_ARCHITECTURES ${SDPA_CUDA_ARCHS})
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    sdpa_find_nvcc(CMAKE_CUDA_COMPILER)
    if(NOT CMAKE_CUDA_COMPILER)
      message(FATAL_ERROR "No nvcc ${SDPA_CUDA_MINIMUM} or newer was found: ${_install_hint}, set CUDACXX, "
                          "or build the host library only with -DSDPA_TARGET=host")
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER MATCHES "/nvidia/cu13/bin/nvcc$")
    # The packaged nvcc looks for its libraries in lib64; they are in lib.
    cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH _bin)
    cmake_path(GET _bin PARENT_PATH _root)
    string(APPEND CMAKE_CUDA_FLAGS_INIT " -L${_root}/lib")
  endif()
endif()

if(host IN_LIST SDPA_TARGET)
  set(_candidates ${_packaged_cuda}/include)
  sdpa_find_nvcc(_nvcc)
  if(_nvcc)
    cmake_path(GET _nvcc PARENT_PATH _bin)
    list(APPEND _candidates ${_bin}/../include)
  endif()
  list(APPEND _candidates /usr/local/cuda/include)
  find_path(SDPA_CUDA_INCLUDE_DIR cuda_runtime_api.h PATHS ${_candidates} NO_DEFAULT_PATH NO_CACHE)
  if(NOT SDPA_CUDA_INCLUDE_DIR)
    message(FATAL_ERROR "The CUDA headers were not found: ${_install_hint}, "
                        "or pass -DSDPA_CUDA_INCLUDE_DIR=/path/to/cuda/include")
  endif()
  # CUDA 13 moved the C++ standard library's headers into a folder of their own.
  set(SDPA_CUDA_INCLUDE_DIRS ${SDPA_CUDA_INCLUDE_DIR})
  if(EXISTS ${SDPA_CUDA_INCLUDE_DIR}/cccl)
    list(APPEND SDPA_CUDA_INCLUDE_DIRS ${SDPA_CUDA_INCLUDE_DIR}/cccl)
  endif()
endif()
