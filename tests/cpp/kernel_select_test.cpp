#include <gtest/gtest.h>

#include "ulysses/kernels/builtin_kernels.h"
#include "ulysses/kernels/cpu_flash/features.h"
#include "ulysses/kernels/kernel.h"

namespace ulysses::kernels {
namespace {

KernelNeed need(std::string device, std::string dtype, int64_t head_dim = 64, int64_t v_head_dim = 64,
                int64_t num_q_per_kv = 1) {
  return {std::move(device), std::move(dtype), head_dim, v_head_dim, num_q_per_kv, /*is_causal=*/false,
          /*backward=*/true};
}

std::string auto_choice(const KernelNeed& n) {
  std::string why;
  const Kernel* kernel = select_kernel("auto", n, all_kernels(), &why);
  return kernel == nullptr ? "none: " + why : std::string(kernel->name());
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

TEST(KernelSelect, RegistryListsEveryKernelInAutoOrder) {
  std::vector<std::string_view> names;
  for (const Kernel* kernel : all_kernels()) names.push_back(kernel->name());
  EXPECT_EQ(names, (std::vector<std::string_view>{"cuda_flash", "cuda_efficient", "cuda_cudnn", "cpu_flash",
                                                  "cpu_fused", "math"}));
  for (const Kernel* kernel : all_kernels()) EXPECT_EQ(find_kernel(kernel->name()), kernel);
  EXPECT_EQ(find_kernel("auto"), nullptr);
  EXPECT_EQ(find_kernel("flash"), nullptr);
}

TEST(KernelSelect, AutoOnCpuIsOurKernelWhereItIsTheFasterElseTheFusedOp) {
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    const std::string_view fastest = flash::is_first_choice(flash::features(), dtype) ? "cpu_flash" : "cpu_fused";
    EXPECT_EQ(auto_choice(need("cpu", dtype)), fastest);
    EXPECT_EQ(auto_choice(need("cpu", dtype, 64, 64, 8)), fastest);
    EXPECT_EQ(auto_choice(need("cpu", dtype, 40, 40)), "cpu_fused");
    KernelNeed masked = need("cpu", dtype);
    masked.has_mask = true;
    EXPECT_EQ(auto_choice(masked), "cpu_fused");
  }
  EXPECT_EQ(auto_choice(need("cpu", "float64")), "cpu_fused");
}

// A kernel that can, and that "auto" leaves to the next.
class Unmeasured final : public Kernel {
 public:
  std::string_view name() const override { return "unmeasured"; }
  std::optional<std::string> refusal(const KernelNeed&) const override { return std::nullopt; }
  std::optional<std::string> auto_refusal(const KernelNeed&) const override { return "is not measured"; }
  KernelOutput forward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const KernelOptions&) const override {
    return {};
  }
  KernelGrads backward(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       const at::Tensor&, const at::Tensor&, const KernelOptions&) const override {
    return {};
  }
};

TEST(KernelSelect, AKernelThatAutoLeavesIsTakenByItsName) {
  const Unmeasured unmeasured;
  const std::vector<const Kernel*> kernels = {&unmeasured, &math_kernel()};
  std::string why;
  EXPECT_EQ(select_kernel("auto", need("cpu", "float32"), kernels, &why), &math_kernel());
  EXPECT_EQ(select_kernel("unmeasured", need("cpu", "float32"), kernels, &why), &unmeasured);
  EXPECT_EQ(select_kernel("auto", need("cpu", "float32"), std::span(kernels).first(1), &why), nullptr);
  EXPECT_EQ(why, "unmeasured is not measured");
}

TEST(KernelSelect, AutoFallsBackToMathForValueHeadDim) {
  EXPECT_EQ(auto_choice(need("cpu", "float32", 64, 32)), "math");
}

TEST(KernelSelect, AutoOnCuda) {
  EXPECT_EQ(auto_choice(need("cuda", "bfloat16")), "cuda_flash");
  EXPECT_EQ(auto_choice(need("cuda", "float16", 128, 128, 4)), "cuda_flash");
  EXPECT_EQ(auto_choice(need("cuda", "float32")), "cuda_efficient");
  EXPECT_EQ(auto_choice(need("cuda", "bfloat16", 64, 128)), "cuda_efficient");
  EXPECT_EQ(auto_choice(need("cuda", "bfloat16", 512, 512)), "cuda_efficient");
  EXPECT_EQ(auto_choice(need("cuda", "float64")), "math");
  EXPECT_EQ(auto_choice(need("cuda", "float32", 30, 30)), "math");
  EXPECT_EQ(auto_choice(need("xpu", "float32")), "math");
}

TEST(KernelSelect, NamedKernelIsTakenWhateverTheOrder) {
  std::string why = "untouched";
  EXPECT_EQ(select_kernel("math", need("cpu", "float32"), all_kernels(), &why), &math_kernel());
  EXPECT_EQ(select_kernel("cuda_cudnn", need("cuda", "float16"), all_kernels(), &why), &cuda_cudnn_kernel());
  EXPECT_EQ(why, "untouched");
}

TEST(KernelSelect, NamedKernelThatRefusesSaysWhy) {
  std::string why;
  EXPECT_EQ(select_kernel("cpu_fused", need("cpu", "float32", 64, 32), all_kernels(), &why), nullptr);
  EXPECT_EQ(why, "cpu_fused needs v_head_dim equal to head_dim=64, not 32");
  EXPECT_EQ(select_kernel("cuda_flash", need("cuda", "float32"), all_kernels(), &why), nullptr);
  EXPECT_TRUE(contains(why, "cuda_flash takes float16 or bfloat16, not float32")) << why;
  EXPECT_TRUE(contains(why, "unproved")) << why;
  EXPECT_EQ(select_kernel("cuda_cudnn", need("cuda", "float16", 64, 64, 4), all_kernels(), &why), nullptr);
  EXPECT_TRUE(contains(why, "4 query heads per KV head")) << why;
  EXPECT_EQ(select_kernel("cuda_efficient", need("cpu", "float32"), all_kernels(), &why), nullptr);
  EXPECT_EQ(why, "cuda_efficient runs on device cuda, not cpu");
}

TEST(KernelSelect, UnknownNameListsTheKnown) {
  std::string why;
  EXPECT_EQ(select_kernel("flash4", need("cpu", "float32"), all_kernels(), &why), nullptr);
  EXPECT_EQ(why,
            "no kernel is named flash4; known: auto, cuda_flash, cuda_efficient, cuda_cudnn, cpu_flash, "
            "cpu_fused, math");
}

TEST(KernelSelect, AutoGivesEveryKernelsReasonWhenNoneServes) {
  const std::vector<const Kernel*> kernels = {&cuda_flash_kernel(), &fused_cpu_kernel()};
  std::string why;
  EXPECT_EQ(select_kernel("auto", need("cpu", "float32", 64, 32), kernels, &why), nullptr);
  EXPECT_EQ(why, "cuda_flash runs on device cuda, not cpu; cpu_fused needs v_head_dim equal to head_dim=64, not 32");
  EXPECT_EQ(select_kernel("auto", need("cpu", "float32", 64, 32), kernels, nullptr), nullptr);
}

}  // namespace
}  // namespace ulysses::kernels
