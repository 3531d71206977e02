# The kernels of the processor family that is built for: kernel_sources, each with the flags of its instruction
# set, and tier_definition. Included by what links them: the Python module here, tests/native.
set(here ${CMAKE_CURRENT_LIST_DIR})
set(kernel_sources ${here}/tiers.cpp ${here}/project_portable.cpp ${here}/ops_portable.cpp)

function(instruction_set flags)
  list(TRANSFORM ARGN PREPEND ${here}/ OUTPUT_VARIABLE files)
  set_source_files_properties(${files} PROPERTIES COMPILE_OPTIONS "${flags}")
  set(kernel_sources ${kernel_sources} ${files} PARENT_SCOPE)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(tier_definition HEADRACE_X86)
  set(bits "-mbmi;-mbmi2;-mlzcnt")
  set(avx512 "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512vnni;${bits}")
  instruction_set("-mavx2;${bits}" project_avx2.cpp ops_avx2.cpp)
  instruction_set("${avx512}" project_avx512.cpp)
  instruction_set("${avx512};-mprefer-vector-width=512" ops_avx512.cpp)
  instruction_set("${avx512};-mavx512vbmi" project_amx.cpp)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  set(tier_definition HEADRACE_ARM)
  instruction_set("-march=armv8.2-a+dotprod" project_neon.cpp ops_neon.cpp)
endif()
