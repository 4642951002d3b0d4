// One rank's attend() fails under agreement="always": every rank raises, and the group goes on.
#include <gtest/gtest.h>

#include "collectives.h"
#include "plain_processor.h"
#include "ulysses/processors/attention_processor.h"
#include "ulysses/ulysses.h"

namespace ulysses::processors {
namespace {

using namespace ulysses::testing;
using exchange::Group;
using kernels::KernelOutput;

// What a faulty rank does in attend().
enum class Fault { kNone, kThrow, kThrowNothing, kThrowNoText, kWrongShape };

class FaultyProcessor : public PlainProcessor {
 public:
  explicit FaultyProcessor(Fault fault) : fault_(fault) {}

 protected:
  KernelOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttendCall& call) override {
    if (fault_ == Fault::kThrow) throw std::runtime_error("out of memory\nwith a traceback");
    if (fault_ == Fault::kThrowNothing) throw 1;
    if (fault_ == Fault::kThrowNoText) throw std::runtime_error("");
    KernelOutput result = PlainProcessor::attend(q, k, v, call);
    if (fault_ == Fault::kWrongShape) result.out = at::cat({result.out, result.out}, 1);
    return result;
  }

 private:
  Fault fault_;
};

// The text that each rank gets when rank 1 has the fault; the group must serve a right call afterwards.
std::vector<std::string> texts_of(const std::string& strategy, int64_t world, Fault fault) {
  std::vector<std::string> texts(static_cast<size_t>(world));
  contract::AttentionOptions options;
  options.agreement = "always";
  options.strategy = strategy;
  run_ranks(world, [&](int64_t rank, const Group& group) {
    const at::Tensor x = at::ones({1, 3, 4, 8});
    FaultyProcessor faulty(rank == 1 ? fault : Fault::kNone);
    std::string& text = texts[static_cast<size_t>(rank)];
    try {
      faulty.forward(x, x, x, group, options);
    } catch (const std::exception& error) {
      text = error.what();
    } catch (int) {
      text = "an int";
    }
    // Equal values: attention over them is that value, whatever the weights.
    const at::Tensor out = FaultyProcessor(Fault::kNone).forward(x, x, x, group, options).out;
    EXPECT_TRUE(at::allclose(out, x));
  });
  return texts;
}

class AttendTogether : public EveryStrategyAndSize {
 protected:
  void expect(Fault fault, const std::string& own, const std::string& told) const {
    const auto& [strategy, world] = GetParam();
    const auto texts = texts_of(strategy, world, fault);
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (rank == 1) {
        EXPECT_TRUE(contains(texts[rank], own)) << texts[rank];
      } else {
        EXPECT_TRUE(contains(texts[rank], "attend() failed on rank 1: " + told)) << texts[rank];
        EXPECT_TRUE(contains(texts[rank], "still usable")) << texts[rank];
        EXPECT_TRUE(contains(texts[rank], "[CP067]")) << texts[rank];
        EXPECT_FALSE(contains(texts[rank], "traceback")) << texts[rank];
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Calls, AttendTogether,
                         ::testing::Combine(::testing::Values("ulysses", "allgather_kv"), ::testing::Values(2, 4)));

TEST_P(AttendTogether, TheOthersLearnWhatOneRankThrewCP067) {
  expect(Fault::kThrow, "out of memory\nwith a traceback", "out of memory (rank ");
}

TEST_P(AttendTogether, AnExceptionWithoutATextIsStillOne) {
  expect(Fault::kThrowNothing, "an int", "an exception without a text");
  expect(Fault::kThrowNoText, "", "an exception without a text");
}

TEST_P(AttendTogether, AWrongShapeOnOneRankIsNamedOnAllCP067) {
  expect(Fault::kWrongShape, "[CP052]", "[attend] attend() returned out float32 [1, ");
}

}  // namespace
}  // namespace ulysses::processors
