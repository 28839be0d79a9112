# Compiles dflash_trt_plugins against the headers of TENSORRT_ROOT instead of tensorrt_abi/interface.h.
set(tensorrt_include ${TENSORRT_ROOT}/include)
if(NOT EXISTS ${tensorrt_include}/NvInferRuntime.h)
  message(FATAL_ERROR "TENSORRT_ROOT: expected ${tensorrt_include}/NvInferRuntime.h, found no such file")
endif()
file(STRINGS ${tensorrt_include}/NvInferVersion.h version_lines REGEX "define TRT_(MAJOR|MINOR)_ENTERPRISE")
string(REGEX REPLACE ".*MAJOR_ENTERPRISE ([0-9]+).*MINOR_ENTERPRISE ([0-9]+).*" "\\1.\\2"
  DFLASH_TENSORRT_VERSION "${version_lines}")

target_compile_definitions(dflash_trt_plugins PRIVATE DFLASH_TENSORRT_SDK=1)
target_include_directories(dflash_trt_plugins SYSTEM PRIVATE ${tensorrt_include})
# TensorRT's headers include <cuda_runtime_api.h>, for the names of two types.
if(CMAKE_CUDA_COMPILER)
  target_include_directories(dflash_trt_plugins SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
else()
  target_include_directories(dflash_trt_plugins SYSTEM PRIVATE tensorrt_abi/no_cuda)
endif()
