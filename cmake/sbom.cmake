# In a wheel: what the libraries hold and under which licences, as sboms/sdpa_cutlass.cdx.json and
# licenses/CUTLASS.txt beside the package's metadata, and their hashes as libraries.json beside the libraries. A wheel
# without them is not made.
if(NOT SKBUILD)
  return()
endif()

set(_libraries "")
set(_built "")
if(cuda IN_LIST SDPA_TARGET)
  list(APPEND _libraries --library $<TARGET_FILE:sdpa_cutlass>)
  list(APPEND _built sdpa_cutlass)
  set(_cuda_include ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
endif()
if(host IN_LIST SDPA_TARGET)
  list(APPEND _libraries --library $<TARGET_FILE:sdpa_cutlass_host>)
  list(APPEND _built sdpa_cutlass_host)
  set(_cuda_include ${SDPA_CUDA_INCLUDE_DIR})
endif()
set(_modules "")
if(TARGET sdpa_launcher)
  list(APPEND _modules --module $<TARGET_FILE:sdpa_launcher>)
  list(APPEND _built sdpa_launcher)
endif()
list(GET _cuda_include 0 _cuda_include)
list(GET SDPA_CUTLASS_INCLUDE_DIRS 0 _cutlass_include)
cmake_path(GET _cutlass_include PARENT_PATH _cutlass_root)

set(_bill ${CMAKE_BINARY_DIR}/sdpa_cutlass.cdx.json)
set(_notice ${CMAKE_BINARY_DIR}/CUTLASS.txt)
set(_hashes ${CMAKE_BINARY_DIR}/libraries.json)
add_custom_command(
  OUTPUT ${_bill} ${_notice} ${_hashes}
  COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/packaging/sbom.py ${_libraries} ${_modules} --cutlass ${_cutlass_root}
          --cuda-include ${_cuda_include} --out ${_bill}
  DEPENDS ${_built} ${CMAKE_SOURCE_DIR}/packaging/sbom.py
  COMMENT "Writing the bill of materials"
  VERBATIM)
add_custom_target(sdpa_sbom ALL DEPENDS ${_bill} ${_notice} ${_hashes})
install(FILES ${_bill} DESTINATION ${SKBUILD_METADATA_DIR}/sboms)
install(FILES ${_notice} DESTINATION ${SKBUILD_METADATA_DIR}/licenses)
install(FILES ${_hashes} DESTINATION sdpa_cutlass)
