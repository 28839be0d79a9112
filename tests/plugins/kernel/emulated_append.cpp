// SPDX-License-Identifier: Apache-2.0
// emulated_append DIRECTORY SEED: one append, emulated, into DIRECTORY/k_cache and v_cache.
//
// These files are the caches between kGuardBytes that are no part of them; what is written shows in them. DIRECTORY/kv,
// page_ids and offsets are the tensors' bytes, DIRECTORY/params has a line "name value" for each number. On the
// stream before the append is a kernel that writes its inputs.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "kv_injection_attention/kernel/append.cuh"
#include "stream.h"

namespace kv = dflash::kv_injection;

namespace {

constexpr size_t kGuardBytes = 4096;

// Bytes that end where the allocation ends, for ASan; 0xff until they are produced.
struct Input {
  explicit Input(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    values.assign(std::istreambuf_iterator<char>(file), {});
    bytes = static_cast<char*>(std::malloc(values.size()));
    std::memset(bytes, 0xff, values.size());
  }
  void produce() { std::memcpy(bytes, values.data(), values.size()); }
  std::vector<char> values;
  char* bytes;
};

void* map(const std::string& path) {
  const int file = open(path.c_str(), O_RDWR);
  const auto size = std::filesystem::file_size(path);
  void* bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file < 0 || bytes == MAP_FAILED) std::exit(6);
  close(file);
  return static_cast<char*>(bytes) + kGuardBytes;
}

}  // namespace

int main(int, char** arguments) {
  const std::string directory = std::string(arguments[1]) + "/";
  std::map<std::string, int64_t> numbers;
  std::ifstream file(directory + "params");
  std::string name;
  int64_t value;
  while (file >> name >> value) numbers[name] = value;
  const auto number = [&](const char* of) { return static_cast<int32_t>(numbers.at(of)); };

  std::map<std::string, Input> inputs;
  for (const char* of : {"kv", "page_ids", "offsets"}) inputs.try_emplace(of, directory + of);
  const auto address = [&](const char* of) { return inputs.at(of).bytes; };
  kv::AppendParams p{};
  p.rows = number("rows");
  p.layers = number("layers");
  p.num_pages = number("num_pages");
  p.page_rows = number("page_rows");
  p.row_bytes = numbers.at("row_bytes");
  p.kv = address("kv");
  p.page_ids = reinterpret_cast<const int32_t*>(address("page_ids"));
  p.offsets = reinterpret_cast<const int32_t*>(address("offsets"));
  p.k_cache = map(directory + "k_cache");
  p.v_cache = map(directory + "v_cache");

  emulator::Stream stream(static_cast<uint32_t>(std::atoi(arguments[2])), DFLASH_EARLY);
  stream.launch(1, 1, 32, 0, [&] {
    if (kv::tid_x() > 0) return;
    for (auto& [of, input] : inputs) input.produce();
  });
  const kv::Grid grid = kv::append_grid(p);
  stream.launch(grid.x, grid.y, grid.threads, grid.shared_bytes, [&] { kv::append(p); });
  stream.run();
  return 0;
}
