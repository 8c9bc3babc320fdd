# What both libraries have in common: language level, warnings, one list of exported names, reproducible objects.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_SKIP_RPATH ON)

set(SDPA_TEMPLATES_DIR ${CMAKE_SOURCE_DIR}/templates)
foreach(_set IN LISTS SDPA_GENERATED_SETS)
  list(TRANSFORM SDPA_UNITS_${_set} PREPEND ${SDPA_GENERATED_DIR}/)
  list(APPEND SDPA_UNIT_FILES ${SDPA_UNITS_${_set}})
endforeach()

# sdpa_library_settings(<target> <archs> <sanitizers>): everything but language and backend.
function(sdpa_library_settings target archs sanitizers)
  target_sources(${target} PRIVATE ${SDPA_TEMPLATES_DIR}/src/c_api.cpp ${SDPA_TEMPLATES_DIR}/src/checks.cpp
                 ${SDPA_GENERATED_DIR}/registry.cpp)
  target_include_directories(${target} PRIVATE ${SDPA_TEMPLATES_DIR}/include)
  target_include_directories(${target} SYSTEM PRIVATE ${SDPA_CUTLASS_INCLUDE_DIRS})
  configure_file(${CMAKE_SOURCE_DIR}/cmake/build_config.hpp.in ${CMAKE_CURRENT_BINARY_DIR}/build_config.hpp @ONLY)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-unknown-pragmas;-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>)
  set(exports ${CMAKE_SOURCE_DIR}/cmake/exports.map)
  target_link_options(${target} PRIVATE -Wl,--version-script=${exports} -Wl,--exclude-libs,ALL -Wl,--no-undefined
                                        -Wl,--build-id=sha1 -Wl,-z,relro,-z,now)
  if(NOT sanitizers)
    target_link_options(${target} PRIVATE -Wl,--strip-all)
  endif()
  set_target_properties(${target} PROPERTIES LINK_DEPENDS ${exports} LIBRARY_OUTPUT_DIRECTORY ${SDPA_LIBRARY_DIR})
  install(TARGETS ${target} LIBRARY DESTINATION sdpa_cutlass)
endfunction()

# The compilers name anonymous things after a random number; seed it with the file's name.
function(sdpa_seed_names flag_prefix)
  foreach(source IN LISTS ARGN)
    cmake_path(GET source FILENAME name)
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${flag_prefix}-frandom-seed=${name})
  endforeach()
endfunction()
