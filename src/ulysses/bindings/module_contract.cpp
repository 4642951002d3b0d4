#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ulysses/base/error.h"
#include "ulysses/bindings/module.h"
#include "ulysses/contract/error_catalogue.h"
#include "ulysses/contract/guide.h"
#include "ulysses/contract/options_text.h"
#include "ulysses/contract/rules.h"
#include "ulysses/partition/check_report.h"
#include "ulysses/partition/head_ranges.h"
#include "ulysses/partition/sequence_layout.h"
#include "ulysses/partition/traffic.h"

namespace ulysses::bindings {
namespace {

namespace py = pybind11;
using contract::policy_from_text;
using partition::SequenceLayout;
using Lengths = std::pair<std::vector<int64_t>, std::vector<int64_t>>;

Lengths lengths_of(const SequenceLayout& layout) { return {layout.lengths(), layout.padded_lengths()}; }

int64_t integer(const py::int_& number) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) throw base::Error({contract::not_64_bit(std::string(py::str(number)))}, "ulysses_attention");
  return value;
}

std::optional<int64_t> integer(const std::optional<py::int_>& number) {
  return number ? std::optional(integer(*number)) : std::nullopt;
}

std::vector<std::pair<int64_t, int64_t>> pairs(const std::vector<partition::Range>& ranges) {
  std::vector<std::pair<int64_t, int64_t>> result;
  for (const partition::Range& range : ranges) result.emplace_back(range.begin, range.end);
  return result;
}

void bind_guide(py::module_& module) {
  module.def("render_guide", [] { return contract::render_guide(contract::kRecipeSource); });
  module.def("render_errors", &contract::render_errors_markdown);
  module.def("render_capability_page", &contract::render_capability_page);
  module.def("error_ids", [] {
    std::vector<std::string> ids;
    for (const contract::CatalogueEntry& entry : contract::error_catalogue()) ids.emplace_back(entry.id);
    return ids;
  });
  module.def("policy_fields", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> fields;
    for (const contract::PolicyField& field : contract::policy_fields())
      fields.emplace_back(field.name, field.default_text, field.meaning);
    return fields;
  });
}

void bind_traffic(py::module_& module) {
  using Function = partition::Traffic (*)(const partition::TrafficSpec&, int64_t);
  const auto define = [&module](const char* name, Function function) {
    module.def(
        name,
        [function](std::vector<int64_t> lengths, std::vector<int64_t> kv_lengths, int64_t batch, int64_t num_heads,
                   int64_t num_kv_heads, int64_t head_dim, int64_t element_bytes, int64_t rank) {
          partition::TrafficSpec spec;
          spec.split_layouts = lengths != kv_lengths;
          spec.lengths = std::move(lengths);
          spec.kv_lengths = std::move(kv_lengths);
          spec.batch = batch;
          spec.num_heads = num_heads;
          spec.num_kv_heads = num_kv_heads;
          spec.head_dim = spec.v_head_dim = head_dim;
          spec.element_bytes = element_bytes;
          const partition::Traffic traffic = function(spec, rank);
          return std::make_pair(traffic.collectives, traffic.bytes_sent);
        },
        py::arg("lengths"), py::arg("kv_lengths"), py::arg("batch"), py::arg("num_heads"), py::arg("num_kv_heads"),
        py::arg("head_dim"), py::arg("element_bytes"), py::arg("rank"));
  };
  define("ulysses_forward_traffic", &partition::ulysses_forward_traffic);
  define("ulysses_backward_traffic", &partition::ulysses_backward_traffic);
  define("allgather_kv_forward_traffic", &partition::allgather_kv_forward_traffic);
  define("allgather_kv_backward_traffic", &partition::allgather_kv_backward_traffic);
}

}  // namespace

void bind_contract(py::module_& module) {
  module.def("sequence_dim", &contract::sequence_dim, py::arg("qkv_format"));
  module.def("padded_seq_len", [](const std::string& policy, const py::int_& seq_len, const py::int_& cp_size) {
    return policy_from_text(policy).padded_seq_len(integer(seq_len), integer(cp_size));
  });
  module.def("validate_config", [](const std::string& policy, const py::int_& seq_len, const py::int_& cp_size) {
    try {
      return policy_from_text(policy).validate_config(integer(seq_len), integer(cp_size));
    } catch (const base::Error& error) {
      return std::vector<std::string>{error.what()};
    }
  });
  module.def("sequence_layout", [](const py::int_& seq_len, const py::int_& cp_size, const std::string& policy,
                                   const std::string& order, const std::optional<py::int_>& cp_rank) {
    partition::token_order(order);
    return lengths_of(SequenceLayout(integer(seq_len), integer(cp_size), policy_from_text(policy), integer(cp_rank)));
  });
  module.def("sequence_layout_from_lengths",
             [](const std::vector<py::int_>& lengths, const std::optional<py::int_>& cp_rank) {
               std::vector<int64_t> numbers;
               for (const py::int_& length : lengths) numbers.push_back(integer(length));
               return lengths_of(SequenceLayout::from_lengths(std::move(numbers), integer(cp_rank)));
             });
  module.def("head_ranges", [](int64_t num_heads, int64_t num_kv_heads, int64_t degree) {
    const partition::HeadRanges ranges = partition::head_ranges(num_heads, num_kv_heads, degree);
    return std::make_pair(pairs(ranges.query), pairs(ranges.kv));
  });
  module.def("check_report", [](int64_t seq_len, int64_t cp_size, std::optional<int64_t> num_heads,
                                std::optional<int64_t> num_kv_heads, const std::string& policy) {
    partition::CheckRequest request;
    request.seq_len = seq_len;
    request.cp_size = cp_size;
    request.num_heads = num_heads;
    request.num_kv_heads = num_kv_heads;
    request.policy = policy_from_text(policy);
    int exit_code = 0;
    std::string text = partition::check_report(request, &exit_code);
    return std::make_pair(std::move(text), exit_code);
  });
  bind_guide(module);
  bind_traffic(module);
}

}  // namespace ulysses::bindings
