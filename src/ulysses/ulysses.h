#pragma once

// The one header for C++ users: context-parallel attention under the names that Python has too. Programs link
// ulysses::ulysses (find_package(ulysses)) and need no Python. examples/cpp/demo.cpp is a whole program.
//
//   #include <ulysses/ulysses.h>
//
//   ulysses::run_ranks(4, [&](int64_t rank, const ulysses::Group& group) {        // or any c10d::ProcessGroup
//     const ulysses::SequenceLayout layout(3001, 4, policy);                      // which rank holds which tokens
//     at::Tensor q = ulysses::shard(whole_q, layout, rank);                       // [B, S_local, H, D]
//     const auto [out, lse] = ulysses::ulysses_attention(q, k, v, group, layout, {.is_causal = true});
//     out.backward(grad_out);
//   });
//
// A backend of your own: derive from UlyssesAttentionProcessor, write attend(), register_backend("name", …), and set
// policy.backend_name = "name". Namespace ulysses::doctor says what is right, refused and wrong with it:
//
//   const ulysses::doctor::Report report = ulysses::doctor::run(ulysses::doctor::processor_target(my_backend));
//   std::cout << report.text();  // examples/cpp/backend.cpp is a whole program
#include <chrono>
#include <cstdint>
#include <functional>

#include "ulysses/base/error.h"
#include "ulysses/contract/attention_spec.h"
#include "ulysses/contract/policy.h"
#include "ulysses/doctor/check_attention.h"
#include "ulysses/doctor/check_same.h"
#include "ulysses/doctor/examine.h"
#include "ulysses/exchange/group.h"
#include "ulysses/kernels/merge_lse.h"
#include "ulysses/partition/sequence_layout.h"
#include "ulysses/processors/attention.h"
#include "ulysses/processors/registry.h"
#include "ulysses/processors/tensor_spec.h"
#include "ulysses/transports/thread/thread_world.h"

namespace ulysses {

using base::Error;
using base::ErrorKind;
using contract::AttentionOptions;
using contract::UlyssesContextParallelPolicy;
using doctor::check_attention;
using doctor::check_same;
using exchange::Group;
using kernels::KernelOutput;
using kernels::merge_attention;
using partition::Range;
using partition::SequenceLayout;
using processors::AttendCall;
using processors::AttentionResult;
using processors::backend_names;
using processors::layout_spec;
using processors::register_backend;
using processors::shard;
using processors::ulysses_attention;
using processors::UlyssesAttentionProcessor;
using processors::unregister_backend;

// Runs fn(rank, group) on world_size threads of this process and joins them; if one throws, the others are unblocked
// and its error is rethrown here. CPU only. Details: transports/thread/thread_world.h.
// Errors: CP006 (world_size), CP062, and whatever fn throws.
inline void run_ranks(int64_t world_size, const std::function<void(int64_t rank, const Group& group)>& fn,
                      std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const transports::RankFunction with_group = [&fn](int64_t rank, const auto& group) { fn(rank, Group(group)); };
  transports::run_ranks(world_size, with_group, timeout);
}

}  // namespace ulysses
