#include "ulysses/bindings/module_report.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "ulysses/contract/capability.h"
#include "ulysses/contract/checklist.h"

namespace ulysses::bindings {

namespace py = pybind11;

namespace {

py::object index_or_none(int64_t index) {
  return index == doctor::kNoFinding ? py::object(py::none()) : py::cast(index);
}
py::object number_or_none(double number) { return number < 0 ? py::object(py::none()) : py::cast(number); }

template <typename Items>
py::list list_of(const Items& items) {
  py::list list;
  for (const auto& item : items) list.append(dict_of(item));
  return list;
}

}  // namespace

py::dict fields_of(const doctor::Case& c) {
  py::dict fields;
  const doctor::Case defaults;
  std::vector<py::object> usual;
  doctor::for_each_field(defaults, [&](const char*, const auto& member) { usual.push_back(py::cast(member)); });
  size_t index = 0;
  doctor::for_each_field(c, [&](const char* name, const auto& member) {
    const py::object value = py::cast(member);
    if (!value.equal(usual[index++])) fields[name] = value;
  });
  return fields;
}

py::dict dict_of(const contract::AttentionOptions& options) {
  const auto lengths = [](const std::optional<contract::LayoutSpec>& layout) {
    return layout ? py::object(py::make_tuple(layout->lengths, layout->padded_lengths)) : py::none();
  };
  const bool replicated = options.kv_role == "replicated";
  std::vector<std::string> requested;
  for (const contract::Feature feature : options.requested) requested.emplace_back(contract::to_string(feature));
  py::dict entry;
  entry["strategy"] = options.strategy;
  entry["agreement"] = options.agreement;
  entry["backend_name"] = options.policy.backend_name;
  entry["output_restore_dim"] = options.policy.output_restore_dim;
  entry["layout"] = lengths(options.layout);
  entry["kv_layout"] = lengths(options.kv_layout || replicated ? options.kv_layout : options.layout);
  entry["is_causal"] = options.is_causal;
  entry["causal_alignment"] = options.causal_alignment;
  entry["softmax_scale"] = options.softmax_scale;
  entry["softcap"] = options.softcap;
  entry["return_lse"] = options.return_lse;
  entry["qkv_format"] = options.qkv_format;
  entry["kv_role"] = options.kv_role;
  entry["mask_layout"] = py::make_tuple(options.mask_q, options.mask_kv);
  entry["joint_len"] = options.joint_len;
  entry["joint_position"] = options.joint_position;
  entry["joint_valid_lens"] = options.joint_valid_lens;
  entry["joint_problem"] = options.joint_problem;
  entry["requested"] = requested;
  return entry;
}

py::dict dict_of(const doctor::CaseResult& result) {
  const auto& [c, verdict, finding] = result;
  py::dict entry;
  entry["id"] = c.id();
  entry["feature"] = c.feature;
  entry["strategy"] = c.strategy;
  entry["cp_size"] = c.cp_size;
  entry["dtype"] = c.dtype;
  entry["backward"] = c.backward;
  entry["verdict"] = to_string(verdict.kind);
  entry["error"] = number_or_none(verdict.error);
  entry["allowed"] = number_or_none(verdict.allowed);
  entry["tensor"] = verdict.tensor;
  entry["message"] = verdict.message;
  entry["tokens"] = verdict.tokens;
  entry["heads"] = verdict.heads;
  entry["ranks"] = verdict.ranks;
  entry["finding"] = index_or_none(finding);
  entry["fields"] = fields_of(c);
  return entry;
}

py::dict dict_of(const doctor::ProbeResult& result) {
  py::dict entry;
  entry["name"] = result.name;
  entry["strategy"] = result.strategy;
  entry["cp_size"] = result.cp_size;
  entry["verdict"] = to_string(result.verdict);
  entry["detail"] = result.detail;
  entry["finding"] = index_or_none(result.finding);
  return entry;
}

py::dict dict_of(const doctor::ReachPicture& picture) {
  py::dict entry;
  entry["title"] = picture.title;
  entry["strategy"] = picture.c.strategy;
  entry["cp_size"] = picture.c.cp_size;
  entry["query_shards"] = picture.c.lengths;
  entry["key_shards"] = picture.c.kv_lengths;
  entry["weights"] = py::cast(picture.measured).attr("tolist")();
  entry["expected"] = py::cast(picture.expected).attr("tolist")();
  return entry;
}

py::dict dict_of(const doctor::Finding& finding) {
  py::dict entry;
  entry["kind"] = finding.kind;
  entry["sentence"] = finding.sentence;
  entry["point"] = contract::checklist_text(finding.checklist_point());
  entry["anchor"] = finding.anchor();
  entry["cases"] = finding.cases;
  return entry;
}

py::dict dict_of(const doctor::Report& report) {
  py::dict entry;
  entry["cases"] = list_of(report.cases);
  entry["probes"] = list_of(report.probes);
  entry["findings"] = list_of(report.findings);
  entry["pictures"] = list_of(report.pictures);
  entry["exit_status"] = report.passed() ? 0 : 1;
  return entry;
}

}  // namespace ulysses::bindings
