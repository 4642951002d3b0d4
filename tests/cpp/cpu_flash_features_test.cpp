#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <vector>

#include "ulysses/kernels/cpu_flash/features.h"
#include "ulysses/kernels/environment.h"

namespace ulysses::kernels {
namespace {

using flash::Features;

constexpr Features kNone{};
constexpr Features kAvx2{.avx2 = true};
constexpr Features kAvx512{.avx2 = true, .avx512 = true};
constexpr Features kBf16{.avx2 = true, .avx512 = true, .avx512_bf16 = true};
constexpr Features kAmx{.avx2 = true, .avx512 = true, .avx512_bf16 = true, .amx = true};

// For the length of a test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* old = std::getenv(name);
    if (old != nullptr) old_ = old, had_ = true;
    setenv(name, value, 1);
  }
  ~Variable() {
    if (had_)
      setenv(name_, old_.c_str(), 1);
    else
      unsetenv(name_);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

// Which code each kind of processor can run, and whether it is what "auto" means there.
TEST(CpuFlashFeatures, WhichProcessorRunsWhat) {
  struct Row {
    Features features;
    const char* dtype;
    bool can_run, is_first_choice;
  };
  const std::vector<Row> rows = {
      {kNone, "float32", false, false},    {kNone, "bfloat16", false, false},
      {kAvx2, "float32", true, true},      {kAvx2, "float16", true, true},
      {kAvx2, "bfloat16", false, false},   {{.avx512 = true}, "float32", true, true},
      {kAvx512, "float32", true, true},    {kAvx512, "float16", true, true},
      {kAvx512, "bfloat16", false, false}, {kBf16, "float32", true, true},
      {kBf16, "float16", true, true},      {kBf16, "bfloat16", true, true},
      {kBf16, "float64", false, false},    {kAmx, "float32", true, false},
      {kAmx, "bfloat16", true, false},     {{.avx512_bf16 = true}, "bfloat16", false, false},
  };
  const bool is_built = flash::instance_for(kBf16, "bfloat16") != nullptr;  // only for x86-64
  if (!is_built) std::cout << "[   KERNEL ] cpu_flash is not part of this build" << std::endl;
  for (const Row& row : rows) {
    EXPECT_EQ(flash::instance_for(row.features, row.dtype) != nullptr, is_built && row.can_run)
        << describe(row.features) << ' ' << row.dtype;
    EXPECT_EQ(flash::is_first_choice(row.features, row.dtype), is_built && row.is_first_choice)
        << describe(row.features) << ' ' << row.dtype;
  }
}

TEST(CpuFlashFeatures, AListAdmitsNoMoreThanTheProcessorHas) {
  EXPECT_EQ(flash::admitted(kAmx, ""), kAmx);
  EXPECT_EQ(flash::admitted(kAmx, "none"), kNone);
  EXPECT_EQ(flash::admitted(kAmx, "avx2"), kAvx2);
  EXPECT_EQ(flash::admitted(kAmx, "avx512"), (Features{.avx512 = true}));
  EXPECT_EQ(flash::admitted(kAmx, "avx2,avx512,avx512_bf16"), kBf16);
  EXPECT_EQ(flash::admitted(kAvx512, "avx2,avx512,avx512_bf16,amx"), kAvx512);
  std::string unknown;
  EXPECT_EQ(flash::admitted(kAmx, "avx2,avx512,avx10,sse", &unknown), kAvx512);
  EXPECT_EQ(unknown, "avx10");
}

TEST(CpuFlashFeatures, TheVariableIsReadAtEveryCall) {
  const Features all = flash::processor_features();
  const Variable none("ULYSSES_CPU_FEATURES", "none");
  EXPECT_EQ(flash::features(), kNone);
  const Variable some("ULYSSES_CPU_FEATURES", "avx2,avx512,avx512_bf16,amx");
  EXPECT_EQ(flash::features(), all);
}

TEST(Environment, ANamedKernelIsThatOfTheCallThenOfTheVariable) {
  EXPECT_EQ(requested_kernel("math"), "math");
  const Variable kernel("ULYSSES_KERNEL", "cpu_fused");
  EXPECT_EQ(requested_kernel("auto"), "cpu_fused");
  EXPECT_EQ(requested_kernel("math"), "math");
  EXPECT_TRUE(environment_problems().empty());
}

TEST(Environment, UnknownWordsListTheKnownCP031) {
  const Variable kernel("ULYSSES_KERNEL", "flash4");
  const Variable features("ULYSSES_CPU_FEATURES", "avx512,avx10");
  const auto problems = environment_problems();
  ASSERT_EQ(problems.size(), 2U);
  EXPECT_EQ(problems[0].id, "CP031");
  EXPECT_EQ(problems[0].what, "ULYSSES_KERNEL=\"flash4\" is unknown");
  EXPECT_NE(problems[0].rule.find("cpu_flash, cpu_fused, math"), std::string::npos) << problems[0].rule;
  EXPECT_EQ(problems[1].what, "ULYSSES_CPU_FEATURES=\"avx10\" is unknown");
  EXPECT_NE(problems[1].fix.find("ULYSSES_CPU_FEATURES=\"avx512\""), std::string::npos) << problems[1].fix;
}

}  // namespace
}  // namespace ulysses::kernels
