# Defines ulysses::torch: the headers and libraries of an installed torch, without find_package(Torch), which is a
# fatal error with a CUDA wheel on a machine without the CUDA toolkit.
# Input:  ULYSSES_TORCH_DIR (folder with torch's include/ and lib/) or, without it, the Python that has torch
#         (Python_EXECUTABLE, else the one that CMake finds).
# Output: ULYSSES_TORCH_DIR, ULYSSES_TORCH_VERSION (major.minor.patch).
if(NOT ULYSSES_TORCH_DIR)
  if(NOT Python_EXECUTABLE)
    find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  endif()
  # Found without importing it, which would take seconds.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE ULYSSES_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE ulysses_torch_missing ERROR_QUIET)
  if(ulysses_torch_missing)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no torch. Fix: install torch there, set Python_EXECUTABLE to a Python "
                        "that has it, or set ULYSSES_TORCH_DIR to a folder with torch's include/ and lib/.")
  endif()
endif()

set(ulysses_torch_header "${ULYSSES_TORCH_DIR}/include/torch/headeronly/version.h")
if(NOT EXISTS "${ulysses_torch_header}")
  message(FATAL_ERROR "No torch 2.11 or newer in ULYSSES_TORCH_DIR=${ULYSSES_TORCH_DIR}: ${ulysses_torch_header} is missing.")
endif()
set(ULYSSES_TORCH_VERSION "")
foreach(part IN ITEMS MAJOR MINOR PATCH)
  file(STRINGS "${ulysses_torch_header}" line REGEX "define TORCH_VERSION_${part} +[0-9]+")
  string(REGEX MATCH "[0-9]+$" number "${line}")
  list(APPEND ULYSSES_TORCH_VERSION "${number}")
endforeach()
list(JOIN ULYSSES_TORCH_VERSION "." ULYSSES_TORCH_VERSION)

if(NOT TARGET ulysses::torch)
  add_library(ulysses::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(ulysses::torch SYSTEM INTERFACE "${ULYSSES_TORCH_DIR}/include"
                                                             "${ULYSSES_TORCH_DIR}/include/torch/csrc/api/include")
  target_link_libraries(ulysses::torch INTERFACE "${ULYSSES_TORCH_DIR}/lib/libtorch.so"
                                                 "${ULYSSES_TORCH_DIR}/lib/libtorch_cpu.so" "${ULYSSES_TORCH_DIR}/lib/libc10.so")
endif()
