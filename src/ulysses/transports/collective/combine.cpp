#include "ulysses/transports/collective/combine.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "ulysses/base/text.h"

namespace ulysses::transports {
namespace {

using Op = c10d::ReduceOp;

// Undefined where torch has no arithmetic for it.
at::ScalarType accumulation_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2:
    case at::kFloat8_e5m2fnuz:
      return at::kFloat;
    case at::kComplexHalf:
      return at::kComplexFloat;
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:  // right modulo 2^64; its order is not that of a signed number, so MIN and MAX are refused
      return at::kLong;
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return dtype;
    default:
      return at::ScalarType::Undefined;
  }
}

void add_block(at::Tensor& sum, const at::Tensor& block, int64_t op) {
  switch (op) {
    case Op::PRODUCT:
      sum.mul_(block);
      break;
    case Op::MIN:
      at::minimum_out(sum, sum, block);
      break;
    case Op::MAX:
      at::maximum_out(sum, sum, block);
      break;
    case Op::BAND:
      sum.bitwise_and_(block);
      break;
    case Op::BOR:
      sum.bitwise_or_(block);
      break;
    case Op::BXOR:
      sum.bitwise_xor_(block);
      break;
    default:
      sum.add_(block);
  }
}

}  // namespace

std::string find_reduction_problem(at::ScalarType dtype, int64_t op) {
  const bool bits = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  const bool order = op == Op::MIN || op == Op::MAX;
  if (!bits && !order && op != Op::SUM && op != Op::AVG && op != Op::PRODUCT) {
    return base::cat("reduce op ", op,
                     " is not one of SUM (0), AVG (1), PRODUCT (2), MIN (3), MAX (4), BAND (5), BOR (6), BXOR (7)");
  }
  if (accumulation_type(dtype) == at::ScalarType::Undefined) {
    return base::cat(c10::toString(dtype), " has no arithmetic; reduce float32");
  }
  const bool whole = c10::isIntegralType(dtype, /*includeBool=*/true);
  if (op == Op::AVG && whole) return base::cat("AVG of ", c10::toString(dtype), "; use SUM");
  if (bits && !whole) return base::cat("BAND, BOR or BXOR of ", c10::toString(dtype), "; only integers have bits");
  if (order && c10::isComplexType(dtype)) {
    return base::cat("MIN or MAX of ", c10::toString(dtype), "; complex numbers have no order");
  }
  if (order && dtype == at::kUInt64) return "MIN or MAX of UInt64; use int64";
  return {};
}

at::Tensor combine(const std::vector<const std::byte*>& blocks, int64_t numel, at::ScalarType dtype, int64_t op) {
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  const auto wide = accumulation_type(dtype);
  at::Tensor sum;
  for (const auto* data : blocks) {
    const auto block = at::from_blob(const_cast<std::byte*>(data), {numel}, at::device(at::kCPU).dtype(dtype));
    if (!sum.defined()) {
      sum = block.to(wide, /*non_blocking=*/false, /*copy=*/true);
    } else {
      add_block(sum, block.to(wide), op);
    }
  }
  if (op == Op::AVG) sum.div_(static_cast<int64_t>(blocks.size()));
  return sum.to(dtype);
}

}  // namespace ulysses::transports
