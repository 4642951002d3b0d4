# The files of our CPU attention kernel, one for each set of processor features, with flags of their own. Which of them
# runs is decided at run time (kernels/cpu_flash/features.cpp); where the compiler or the processor cannot, none is built.
include(CheckCXXCompilerFlag)

set(avx2_flags -mavx2 -mfma -mf16c)
set(avx512_flags -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma)
# g++ reports values that its own headers leave undefined on purpose.
set(quiet_flags -Wno-uninitialized -Wno-maybe-uninitialized)

# ulysses_cpu_flash_file(<target> <source> <define> <flags>…): adds the source if the compiler takes the flags.
function(ulysses_cpu_flash_file target source define)
  list(JOIN ARGN " " flags)
  check_cxx_compiler_flag("${flags}" ${define})
  if(NOT ${define})
    return()
  endif()
  target_sources(${target} PRIVATE "${source}")
  target_compile_definitions(${target} PRIVATE ${define})
  set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${ARGN};${quiet_flags}")
endfunction()

function(ulysses_cpu_flash_sources target folder)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    ulysses_cpu_flash_file(${target} "${folder}/avx2.cpp" ULYSSES_CPU_FLASH_AVX2 ${avx2_flags})
    ulysses_cpu_flash_file(${target} "${folder}/avx512.cpp" ULYSSES_CPU_FLASH_AVX512 ${avx512_flags})
    ulysses_cpu_flash_file(${target} "${folder}/avx512_bf16.cpp" ULYSSES_CPU_FLASH_AVX512_BF16 ${avx512_flags}
                           -mavx512bf16)
  endif()
endfunction()
