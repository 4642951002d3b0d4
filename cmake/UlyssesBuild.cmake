# How every target of this project is compiled: standard, warnings, sanitizers, ccache.
include(GNUInstallDirs)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# One spelling of -fPIC for libraries and programs, or a precompiled header made for one is refused by the other.
add_compile_options(-fPIC)

if(ULYSSES_SANITIZE STREQUAL "address")
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=undefined)
elseif(ULYSSES_SANITIZE STREQUAL "thread")
  # g++ warns of a fence in torch's header for Python objects, which ThreadSanitizer does not model.
  set(sanitizers -fsanitize=thread -Wno-tsan)
elseif(NOT ULYSSES_SANITIZE STREQUAL "")
  message(FATAL_ERROR "ULYSSES_SANITIZE=${ULYSSES_SANITIZE} is not known: use address or thread")
endif()
if(ULYSSES_SANITIZE)
  # g++ reports uninitialised reads that are none once the sanitizers have rewritten the code.
  add_compile_options(${sanitizers} -O1 -g1 -fno-omit-frame-pointer -Wno-maybe-uninitialized)
  add_link_options(${sanitizers})
elseif(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
# torch's headers are heavy: -O3 costs compile time and gives nothing, the hot loops are torch's own kernels.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

find_program(ULYSSES_CCACHE ccache)
if(ULYSSES_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Without this sloppiness nothing that uses a precompiled header is ever found in the cache.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${ULYSSES_CCACHE}")
endif()

# Settings shared by every target of our own; not exported to users.
function(ulysses_configure target)
  # Options structs are filled by name; what is left out has its default.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wno-missing-field-initializers
                                           $<$<BOOL:${ULYSSES_WERROR}>:-Werror>)
  # The define that CMake adds per library would make equal sources differ for ccache.
  set_target_properties(${target} PROPERTIES DEFINE_SYMBOL "")
endfunction()

# ulysses_glob(<variable> <pattern>…): sources under the current folder; new files are seen by the next build.
function(ulysses_glob variable)
  list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/" OUTPUT_VARIABLE patterns)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${patterns})
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()
