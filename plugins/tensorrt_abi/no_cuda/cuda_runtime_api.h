// SPDX-License-Identifier: Apache-2.0
// The types that TensorRT's headers take from CUDA, for a build against the SDK without CUDA.
#pragma once

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
