// SPDX-License-Identifier: Apache-2.0
// The emulator as one source: most of what each of its files took to compile were the same headers.
#include "emulator.cpp"
#include "fiber.cpp"
#include "stream.cpp"
#include "warpgroup.cpp"
