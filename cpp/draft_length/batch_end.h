// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "draft_length/matrix.h"

namespace dflash {

// How long a batch that nobody follows takes until its last request has ended, by the draft length
// that it begins with.
//
// Where others follow, the most tokens a second are best. Where none does, what counts is when the
// last one ends: drafts bring some requests to their end early, and the slowest run on in a batch
// so small that a step brings little.
//
// Returns expected seconds [K + 1] until all N requests have ended, of which B run at once and each
// other one takes the place of the first that ends. They verify k = 0 .. K drafts each until no
// more than half of B run, and from then on whatever number is best. `remaining` [N] is how many
// tokens each still gets, `reached` [N, K] the probability that its first i drafts are all
// accepted, `seconds` [S, K + 1] what a step takes by length over `sizes` [S] requests, ascending,
// the last of them B; between them are straight lines. Every step of a request brings its mean
// number of tokens, and each request takes one at least.
std::vector<double> seconds_to_end(const std::vector<double>& remaining, const Matrix& reached,
                                   const std::vector<double>& sizes, const Matrix& seconds);

}  // namespace dflash
