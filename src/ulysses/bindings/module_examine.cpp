#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/bindings/module.h"
#include "ulysses/contract/capability.h"
#include "ulysses/contract/checklist.h"
#include "ulysses/doctor/examine.h"
#include "ulysses/doctor/probes.h"

namespace ulysses::bindings {
namespace {

namespace py = pybind11;
using doctor::Case;
using doctor::Outcome;
using doctor::Question;
using doctor::RankAnswer;
using doctor::RankCall;
using doctor::Report;
using processors::AttentionResult;

// ---- data: cases as dicts of the fields that are set, questions and answers as tuples

py::dict fields_of(const Case& c) {
  py::dict fields;
  const Case defaults;
  std::vector<py::object> usual;
  doctor::for_each_field(defaults, [&](const char*, const auto& member) { usual.push_back(py::cast(member)); });
  size_t index = 0;
  doctor::for_each_field(c, [&](const char* name, const auto& member) {
    const py::object value = py::cast(member);
    if (!value.equal(usual[index++])) fields[name] = value;
  });
  return fields;
}

// Errors: CP012 for fields that make no case; TypeError for a value of another type.
Case case_of(const py::dict& fields) {
  Case c;
  size_t used = 0;
  std::string problem;
  doctor::for_each_field(c, [&](const char* name, auto& member) {
    if (!fields.contains(name)) return;
    try {
      member = py::cast<std::decay_t<decltype(member)>>(fields[name]);
    } catch (const py::cast_error&) {
      problem = base::cat(name, "=", std::string(py::repr(fields[name])), " is of another type");
    }
    ++used;
  });
  if (problem.empty()) problem = doctor::problem_of(c);
  if (used != fields.size())
    problem = base::cat("not all of ", std::string(py::str(fields.attr("keys")())), " are fields of a case");
  if (!problem.empty())
    throw base::Error({{"CP012", base::ErrorKind::kInvalidArgument, problem, "", "the line that the doctor printed"}},
                      "repro");
  return c;
}

using Tensors = std::vector<std::optional<at::Tensor>>;

template <typename... Members>
Tensors optional_tensors(const Members&... members) {
  const auto one = [](const at::Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; };
  return {one(members)...};
}

at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

py::tuple pack(const Question& q) {
  return py::make_tuple(fields_of(q.c),
                        optional_tensors(q.q, q.k, q.v, q.grad_out, q.mask, q.text_q, q.text_k, q.text_v), q.padding,
                        q.count_bytes, q.hold_result, q.odd_rank);
}

Question unpack_question(const py::tuple& packed) {
  const auto x = py::cast<Tensors>(packed[1]);
  const auto at = [&](size_t i) { return or_undefined(x[i]); };
  return {case_of(packed[0]),
          at(0),
          at(1),
          at(2),
          at(3),
          at(4),
          at(5),
          at(6),
          at(7),
          py::cast<double>(packed[2]),
          py::cast<bool>(packed[3]),
          py::cast<bool>(packed[4]),
          py::cast<int64_t>(packed[5])};
}

py::tuple pack_answer(const RankAnswer& a) {
  return py::make_tuple(static_cast<int64_t>(a.outcome), a.message, optional_tensors(a.out, a.lse, a.dq, a.dk, a.dv),
                        a.violation, a.collectives, a.bytes_sent);
}

RankAnswer unpack_answer(const py::tuple& packed) {
  const auto x = py::cast<Tensors>(packed[2]);
  const auto at = [&](size_t i) { return or_undefined(x[i]); };
  return {static_cast<Outcome>(py::cast<int64_t>(packed[0])),
          py::cast<std::string>(packed[1]),
          at(0),
          at(1),
          at(2),
          at(3),
          at(4),
          py::cast<std::string>(packed[3]),
          py::cast<int64_t>(packed[4]),
          py::cast<int64_t>(packed[5])};
}

// ---- a Python function (q, k, v, group, call) -> out or (out, lse) as a target

AttentionResult result_of(const py::object& returned) {
  if (py::isinstance<py::tuple>(returned) && py::len(returned) == 2) {
    const auto pair = py::cast<py::tuple>(returned);
    if (THPVariable_Check(pair[0].ptr()) && THPVariable_Check(pair[1].ptr()))
      return {py::cast<at::Tensor>(pair[0]), py::cast<at::Tensor>(pair[1])};
  }
  if (THPVariable_Check(returned.ptr())) return {py::cast<at::Tensor>(returned), {}};
  throw py::type_error("the call returned " + std::string(py::str(py::type::of(returned).attr("__name__"))) +
                       " instead of a tensor like q, or (out, lse)");
}

doctor::Target python_target(const py::function& function) {
  // Released with the lock held, whichever thread lets go of it last.
  const std::shared_ptr<py::function> shared(new py::function(function), [](py::function* held) {
    const py::gil_scoped_acquire gil;
    delete held;
  });
  return [shared](const RankCall& call, const exchange::Group& group) {
    const py::gil_scoped_acquire gil;
    try {
      return result_of((*shared)(call.q, call.k, call.v, group.process_group(), call));
    } catch (py::error_already_set& error) {  // must not outlive the lock
      const py::object type = error.type(), value = error.value();
      throw std::runtime_error(
          base::cat(std::string(py::str(type.attr("__name__"))), ": ", std::string(py::str(value))));
    }
  };
}

// A Python class that brings the questions to ranks that are processes.
class PyRanks : public doctor::Ranks {
 public:
  std::vector<RankAnswer> ask(const Question& question) override {
    const py::gil_scoped_acquire gil;
    PYBIND11_OVERRIDE_PURE(std::vector<RankAnswer>, doctor::Ranks, ask, question);
  }
};

// Looks for Ctrl-C after each question: the interpreter's own look waits until the core returns.
class InterruptibleRanks final : public doctor::ThreadRanks {
 public:
  using ThreadRanks::ThreadRanks;
  std::vector<RankAnswer> ask(const Question& question) override {
    std::vector<RankAnswer> answers = ThreadRanks::ask(question);
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return answers;
  }
};

// ---- the report as the JSON-able dict that docs/doctor-report.md describes

py::object index_or_none(int64_t index) {
  return index == doctor::kNoFinding ? py::object(py::none()) : py::cast(index);
}
py::object number_or_none(double number) { return number < 0 ? py::object(py::none()) : py::cast(number); }

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

py::dict dict_of(const doctor::Finding& finding) {
  py::dict entry;
  entry["kind"] = finding.kind;
  entry["sentence"] = finding.sentence;
  entry["point"] = contract::checklist_text(finding.checklist_point());
  entry["anchor"] = finding.anchor();
  entry["cases"] = finding.cases;
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

template <typename Items>
py::list list_of(const Items& items) {
  py::list list;
  for (const auto& item : items) list.append(dict_of(item));
  return list;
}

py::dict dict_of(const Report& report) {
  py::dict entry;
  entry["cases"] = list_of(report.cases);
  entry["probes"] = list_of(report.probes);
  entry["findings"] = list_of(report.findings);
  entry["pictures"] = list_of(report.pictures);
  entry["exit_status"] = report.passed() ? 0 : 1;
  return entry;
}

py::dict examine(doctor::Ranks& ranks, doctor::CaseSelection selection, bool probes,
                 const std::optional<py::function>& on_case) {
  doctor::ExamineOptions options;
  options.selection = std::move(selection);
  options.probes = probes;
  if (on_case) {
    options.on_case = [&on_case](const doctor::CaseResult& result, int64_t done, int64_t total) {
      const py::gil_scoped_acquire gil;
      (*on_case)(dict_of(result), done, total);
    };
  }
  Report report;
  {
    const py::gil_scoped_release no_gil;
    report = doctor::examine(ranks, options);
  }
  return dict_of(report);
}

void bind_data(py::module_& module) {
  py::class_<Case> case_class(module, "Case", "One call of a context-parallel attention, as data.");
  case_class.def(py::init(&case_of)).def("id", &Case::id).def("fields", &fields_of);
  case_class.def(py::pickle([](const Case& c) { return py::make_tuple(fields_of(c)); },
                            [](const py::tuple& packed) { return case_of(packed[0]); }));
  Case example;
  doctor::for_each_field(example, [&](const char* name, const auto&) {
    const std::string key = name;
    case_class.def_property_readonly(name, [key](const Case& c) {
      py::object value;
      doctor::for_each_field(c, [&](const char* field, const auto& member) {
        if (key == field) value = py::cast(member);
      });
      return value;
    });
  });
  py::class_<Question>(module, "Question", "A case with its inputs, for the ranks.")
      .def_readonly("case", &Question::c)
      .def(py::pickle(&pack, &unpack_question));
  py::class_<RankAnswer>(module, "RankAnswer", "What one rank answered.")
      .def_readonly("message", &RankAnswer::message)
      .def_property_readonly("outcome", [](const RankAnswer& a) { return static_cast<int64_t>(a.outcome); })
      .def_static("crashed",
                  [](std::string text) {
                    return RankAnswer{Outcome::kCrashed, std::move(text)};
                  })
      .def_static("hung",
                  [](std::string text) {
                    return RankAnswer{Outcome::kHung, std::move(text)};
                  })
      .def_static("released",
                  [](std::string text) {
                    return RankAnswer{Outcome::kReleased, std::move(text)};
                  })
      .def(py::pickle(&pack_answer, &unpack_answer));
  py::class_<RankCall>(module, "RankCall", "What a target is told beside q, k and v.")
      .def_property_readonly("case", [](const RankCall& call) { return call.c; })
      .def_property_readonly("mask", [](const RankCall& call) { return optional_tensors(call.mask)[0]; })
      .def_property_readonly(
          "text", [](const RankCall& call) { return optional_tensors(call.text_q, call.text_k, call.text_v); });
}

void bind_ranks(py::module_& module) {
  py::class_<doctor::Ranks, PyRanks>(module, "DoctorRanks").def(py::init<>());
  py::class_<InterruptibleRanks, doctor::Ranks>(module, "ThreadRanks")
      .def(py::init([](const py::function& function, double hang_limit_s) {
             return new InterruptibleRanks(python_target(function),
                                           std::chrono::milliseconds(static_cast<int64_t>(hang_limit_s * 1000)));
           }),
           py::arg("function"), py::arg("hang_limit_s") = 5.0)
      .def_property_readonly("stuck_threads", &InterruptibleRanks::stuck_threads);
  py::class_<doctor::GroupRanks, doctor::Ranks>(module, "GroupRanks")
      .def(py::init([](const py::function& function, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& answers) {
             return doctor::GroupRanks(python_target(function), exchange::Group(group), exchange::Group(answers));
           }),
           py::arg("function"), py::arg("group"), py::arg("answers"));
}

void bind_functions(py::module_& module) {
  py::class_<doctor::CaseSelection>(module, "CaseSelection")
      .def(py::init<>())
      .def_readwrite("worlds", &doctor::CaseSelection::worlds)
      .def_readwrite("strategies", &doctor::CaseSelection::strategies)
      .def_readwrite("dtypes", &doctor::CaseSelection::dtypes)
      .def_readwrite("quick", &doctor::CaseSelection::quick)
      .def_readwrite("glob", &doctor::CaseSelection::glob);
  module.def("make_cases", &doctor::make_cases);
  module.def("known_strategies", [] {
    const auto known = contract::known_strategies();
    return std::vector<std::string>(known.begin(), known.end());
  });
  module.def("probe_names", [] {
    std::vector<std::string> names;
    for (const doctor::Probe& probe : doctor::all_probes()) names.emplace_back(probe.name);
    return names;
  });
  // Feature -> id under which the strategy refuses it, "" for what it supports.
  module.def("capabilities", [](const std::string& strategy) {
    std::map<std::string, std::string> ids;
    for (const contract::Feature feature : contract::all_features())
      ids.emplace(contract::to_string(feature), contract::capability(strategy, feature).id);
    return ids;
  });
  module.def(
      "answer_on_rank",
      [](const Question& question, const py::function& function, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        const doctor::Target target = python_target(function);
        RankAnswer answer;
        {
          const py::gil_scoped_release no_gil;
          answer = doctor::answer_on_rank(question, target, exchange::Group(group));
        }
        PyErr_Clear();  // a backward in Python leaves its error set beside the exception that became the answer
        return answer;
      },
      py::arg("question"), py::arg("function"), py::arg("group"));
  module.def("examine", &examine, py::arg("ranks"), py::arg("selection"), py::arg("probes") = true,
             py::arg("on_case") = py::none());
  module.def(
      "examine_case",
      [](doctor::Ranks& ranks, const Case& c) {
        std::vector<doctor::ExaminedCase> examined;
        {
          const py::gil_scoped_release no_gil;
          examined = doctor::examine_case(ranks, c);
        }
        py::list pairs;
        for (const auto& [result, finding] : examined)
          pairs.append(py::make_tuple(dict_of(result), finding ? py::object(dict_of(*finding)) : py::none()));
        return pairs;
      },
      py::arg("ranks"), py::arg("case"));
}

}  // namespace

void bind_examine(py::module_& module) {
  bind_data(module);
  bind_ranks(module);
  bind_functions(module);
}

}  // namespace ulysses::bindings
