# What the compilers can do: the version of nvcc, seeds for reproducible objects, a compiler cache.
include(CheckCompilerFlag)

if(cuda IN_LIST SDPA_TARGET)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS SDPA_CUDA_MINIMUM)
    message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} is release ${CMAKE_CUDA_COMPILER_VERSION}; "
                        "${SDPA_CUDA_MINIMUM} or newer is needed: ${_install_hint}")
  endif()
  check_compiler_flag(CUDA -frandom-seed=1 SDPA_NVCC_HAS_RANDOM_SEED)
  message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${SDPA_CUDA_ARCHS}")
endif()

find_program(SDPA_CCACHE ccache DOC "Compiler cache (empty: none)")
if(NOT SDPA_CCACHE)
  set(SDPA_CCACHE "")
endif()
