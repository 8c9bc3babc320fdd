# The Python that runs the generator and knows where the pinned toolchain lies: the one asked for, else the active
# virtual environment, else the checkout's own .venv, else the system's.
if(NOT Python_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV} AND EXISTS ${CMAKE_SOURCE_DIR}/.venv/bin/python)
  set(Python_EXECUTABLE ${CMAKE_SOURCE_DIR}/.venv/bin/python)
endif()
find_package(Python 3.10 COMPONENTS Interpreter)
if(NOT Python_FOUND)
  message(FATAL_ERROR "Python 3.10 or newer is needed; pass -DPython_EXECUTABLE=/path/to/python3")
endif()

# Runs one line of Python and returns what it prints.
function(sdpa_ask_python result code)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${code}" OUTPUT_VARIABLE output ERROR_QUIET
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

sdpa_ask_python(_has_jinja2 "import jinja2; print('yes')")
if(NOT _has_jinja2)
  message(FATAL_ERROR "The generator needs Jinja2: ${Python_EXECUTABLE} -m pip install jinja2")
endif()
