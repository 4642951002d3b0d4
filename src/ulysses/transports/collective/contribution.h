#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ulysses::transports {

template <typename Byte>
struct Block {
  Byte* data = nullptr;
  int64_t bytes = 0;
};

// What one rank brings to a collective.
struct Contribution {
  Contribution() = default;
  Contribution(std::string_view name, int64_t size)
      : op(name), send(static_cast<size_t>(size)), receive(static_cast<size_t>(size)) {}

  std::string_view op;  // a literal: "all_to_all"
  std::string problem;  // why this rank refuses the call; it takes part all the same, so that nobody waits for it
  at::ScalarType dtype = at::ScalarType::Undefined;
  int64_t root = -1;                         // -1: the collective has none
  int64_t reduce_op = -1;                    // -1: nothing is reduced
  bool same_for_all = false;                 // `send` holds one and the same block for every destination
  std::vector<Block<const std::byte>> send;  // per destination
  std::vector<Block<std::byte>> receive;     // per source; without data: sizes only, what comes is combined
  std::vector<at::Tensor> keep_alive;        // the memory of the blocks
};

// Why these ranks cannot do this collective together, empty if they can. Pure: every rank comes to the same text.
std::string find_disagreement(const std::vector<Contribution>& ranks);

// "rank 1", "ranks 1, 3"
std::string name_ranks(const std::vector<int64_t>& ranks);

}  // namespace ulysses::transports
