// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace dflash {

// Layers of one shape whose rows, weights, biases and outputs are contiguous: one layer, or the experts of one. They
// begin at `first`; counts[e] is the number of rows of layer e, `weight_size` the number of elements of a weight.
// Layers without rows are skipped. Corresponds to torch's grouped_mm.
template <class Layer>
std::vector<Layer> split_by_weight(const Layer& first, const std::vector<int64_t>& counts, int64_t weight_size) {
  std::vector<Layer> layers;
  Layer layer = first;
  for (const int64_t count : counts) {
    layer.num_rows = count;
    if (count > 0) layers.push_back(layer);
    layer.x += count * layer.num_inputs;
    layer.out += count * layer.num_outputs;
    layer.weight += weight_size;
    if (layer.bias != nullptr) layer.bias += layer.num_outputs;
  }
  return layers;
}

}  // namespace dflash
