// SPDX-License-Identifier: Apache-2.0
// emulated_call DIRECTORY CTAS SEED: one call of both kernels, emulated: those that emulated_kernel.cpp was compiled for.
//
// DIRECTORY/params has a line "name value" for each number of Params, DIRECTORY/<tensor> the bytes of each tensor.
// Writes DIRECTORY/out and prints the config. CTAS is how many CTAs the GPU is said to hold; SEED orders CTAs and threads.
// On the stream before the call is a kernel that writes its inputs, but for what no memory would hold.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "emulated_kernel.h"
#include "kv_injection_attention/kernel.h"

namespace {

constexpr size_t kSparseBytes = size_t{1} << 30;

// The tensor's bytes end where the allocation ends, so ASan detects every access beyond.
struct Tensor {
  explicit Tensor(size_t size) : bytes(static_cast<unsigned char*>(std::malloc(size))), size(size) {}
  unsigned char* bytes;
  size_t size;
};

class Call {
 public:
  explicit Call(const std::string& directory) : directory_(directory + "/") {
    std::ifstream file(directory_ + "params");
    std::string name;
    double value;
    while (file >> name >> value) numbers_[name] = value;
  }

  kv::Params params() {
    kv::Params p{};
    p.batch = integer("batch");
    p.block = integer("block");
    p.num_heads = integer("num_heads");
    p.num_kv_heads = integer("num_kv_heads");
    p.head_dim = integer("head_dim");
    p.slots = integer("slots");
    p.layers = integer("layers");
    p.max_pages = integer("max_pages");
    p.layer = integer("layer");
    p.sliding_window = integer("sliding_window");
    p.causal = integer("causal");
    p.rms_norm_eps = real("rms_norm_eps");
    p.softmax_scale = real("softmax_scale");
    p.k_scale = real("k_scale");
    p.v_scale = real("v_scale");
    p.block_dtype = static_cast<kv::DType>(integer("block_dtype"));
    p.cache_dtype = static_cast<kv::DType>(integer("cache_dtype"));
    p.out_dtype = static_cast<kv::DType>(integer("out_dtype"));
    p.out_scale = real("output_scale");
    p.qkv = read("qkv");
    p.qkv_bias = read("qkv_bias");
    p.q_norm = read("q_norm");
    p.k_norm = read("k_norm");
    p.rope = static_cast<const float*>(read("rope"));
    p.context_pointers = pointers(read("pool"));
    p.context_layout = static_cast<const int64_t*>(read("context_layout"));
    p.page_table = static_cast<const int32_t*>(read("page_table"));
    p.slot_ids = static_cast<const int32_t*>(read("slot_ids"));
    p.context_lengths = static_cast<const int32_t*>(read("context_lengths"));
    p.sinks = static_cast<const float*>(read("sinks"));
    out_ = filled(out_bytes(p)).bytes;
    p.out = out_;
    p.workspace_bytes = takes_workspace() ? kv::workspace_size(p) : 0;
    p.workspace = filled(p.workspace_bytes).bytes;
    return p;
  }

  // Work of the kernel before this call.
  void produce() {
    for (const auto& [tensor, copy] : inputs_) std::copy(copy.begin(), copy.end(), tensor.bytes);
  }

  void finish(const kv::Params& p) {
    for (const auto& [tensor, copy] : inputs_) {
      if (!std::equal(copy.begin(), copy.end(), reinterpret_cast<const char*>(tensor.bytes))) {
        std::cerr << "an input was changed\n";
        std::exit(4);
      }
    }
    std::ofstream(directory_ + "out", std::ios::binary)
        .write(reinterpret_cast<const char*>(out_), static_cast<std::streamsize>(out_bytes(p)));
  }

 private:
  static size_t out_bytes(const kv::Params& p) {
    const size_t element = p.out_dtype == kv::DType::kF8E4M3 ? 1 : 2;
    return element * p.batch * p.block * p.num_heads * p.head_dim;
  }

  int32_t integer(const char* name) { return static_cast<int32_t>(numbers_.at(name)); }
  float real(const char* name) { return static_cast<float>(numbers_.at(name)); }

  const void* read(const char* name) {
    std::ifstream file(directory_ + name, std::ios::binary);
    if (!file) return nullptr;
    const auto size = std::filesystem::file_size(directory_ + name);
    if (size >= kSparseBytes) return map(directory_ + name, size);
    std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    const Tensor tensor = filled(bytes.size());  // NaN until it is produced
    inputs_.emplace_back(tensor, std::move(bytes));
    return tensor.bytes;
  }

  // The file has offsets into the pool and checksums of them.
  const int64_t* pointers(const void* pool) {
    const void* tensor = read("context_pointers");
    std::vector<char>& bytes = inputs_.back().second;
    for (size_t at = 0; at < bytes.size(); at += sizeof(int64_t)) {
      int64_t value;
      std::memcpy(&value, &bytes[at], sizeof value);
      const auto begin = reinterpret_cast<intptr_t>(pool);
      value += at / sizeof value % kv::kPointerSize == kv::kAddress ? begin : -begin;  // ~(a + b) is ~a - b
      std::memcpy(&bytes[at], &value, sizeof value);
    }
    return static_cast<const int64_t*>(tensor);
  }

  // A sparse file, larger than memory. Writing to it is an error.
  static const void* map(const std::string& path, size_t size) {
    const int file = open(path.c_str(), O_RDONLY);
    void* bytes = mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_NORESERVE, file, 0);
    if (file < 0 || bytes == MAP_FAILED) std::exit(6);
    close(file);
    return bytes;
  }

  // NaN in every format.
  static Tensor filled(size_t size) {
    Tensor tensor(size);
    std::memset(tensor.bytes, 0xff, size);
    return tensor;
  }

  std::string directory_;
  std::map<std::string, double> numbers_;
  std::vector<std::pair<Tensor, std::vector<char>>> inputs_;
  unsigned char* out_ = nullptr;
};

}  // namespace

int main(int, char** arguments) {
  Call call(arguments[1]);
  const kv::Params p = call.params();
  if (p.batch == 0) return call.produce(), call.finish(p), 0;
  const kv::LaunchConfig config = launch_config(p, std::atoi(arguments[2]));
  std::cout << config.row_tiles << " " << config.tile_rows << " " << config.row_groups << " " << config.teams << " "
            << config.ranges << " " << config.shared_bytes << "\n";
  if (!run([&] { call.produce(); }, p, config, static_cast<uint32_t>(std::atoi(arguments[3])))) return 5;
  call.finish(p);
  return 0;
}
