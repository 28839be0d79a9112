// SPDX-License-Identifier: Apache-2.0
// Marks what the library exports. Its names are those of C: a linker's script lists them (see CMakeLists.txt).
#pragma once

#define DFLASH_EXPORT extern "C" __attribute__((visibility("default")))
