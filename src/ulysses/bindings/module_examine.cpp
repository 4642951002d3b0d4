#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ulysses/base/error.h"
#include "ulysses/base/text.h"
#include "ulysses/bindings/module.h"
#include "ulysses/bindings/module_report.h"
#include "ulysses/bindings/ops_call.h"
#include "ulysses/contract/capability.h"
#include "ulysses/doctor/examine.h"
#include "ulysses/doctor/examiner.h"
#include "ulysses/doctor/probes.h"
#include "ulysses/processors/executed.h"

namespace ulysses::bindings {
namespace {

namespace py = pybind11;
using doctor::Case;
using doctor::Outcome;
using doctor::Question;
using doctor::RankAnswer;
using doctor::RankCall;
using doctor::Report;
using doctor::Returned;

// ---- data: cases as dicts of the fields that are set, questions and answers as tuples

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

std::optional<at::Tensor> given(const at::Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; }

template <typename Data>
Tensors pack_tensors(const Data& data) {
  Tensors packed;
  for (const at::Tensor* x : Data::tensors(data)) packed.push_back(given(*x));
  return packed;
}

template <typename Data>
void unpack_tensors(const py::object& packed, Data& data) {
  const auto tensors = py::cast<Tensors>(packed);
  size_t index = 0;
  for (at::Tensor* x : Data::tensors(data)) *x = tensors.at(index++).value_or(at::Tensor());
}

py::tuple pack(const Question& q) {
  return py::make_tuple(fields_of(q.c), pack_tensors(q), q.padding, q.count_bytes, q.hold_result, q.odd_rank);
}

Question unpack_question(const py::tuple& packed) {
  Question q;
  q.c = case_of(packed[0]);
  unpack_tensors(packed[1], q);
  q.padding = py::cast<double>(packed[2]);
  q.count_bytes = py::cast<bool>(packed[3]);
  q.hold_result = py::cast<bool>(packed[4]);
  q.odd_rank = py::cast<int64_t>(packed[5]);
  return q;
}

py::tuple pack_answer(const RankAnswer& a) {
  return py::make_tuple(static_cast<int64_t>(a.outcome), a.message, pack_tensors(a), a.violation, a.collectives,
                        a.bytes_sent);
}

RankAnswer unpack_answer(const py::tuple& packed) {
  RankAnswer a;
  a.outcome = static_cast<Outcome>(py::cast<int64_t>(packed[0]));
  a.message = py::cast<std::string>(packed[1]);
  unpack_tensors(packed[2], a);
  a.violation = py::cast<std::string>(packed[3]);
  a.collectives = py::cast<int64_t>(packed[4]);
  a.bytes_sent = py::cast<int64_t>(packed[5]);
  return a;
}

// ---- a Python function (q, k, v, group, call) -> out or (out, lse) as a target; with joint tokens out and lse are
// pairs

std::string type_name(const py::handle& object) { return py::str(py::type::of(object).attr("__name__")); }

bool is_tensor(const py::handle& object) { return THPVariable_Check(object.ptr()); }

// (tensor, tensor) of what is one.
std::optional<std::pair<at::Tensor, at::Tensor>> pair_of(const py::object& object) {
  if (!py::isinstance<py::tuple>(object) || py::len(object) != 2) return std::nullopt;
  const auto pair = py::cast<py::tuple>(object);
  if (!is_tensor(pair[0]) || !is_tensor(pair[1])) return std::nullopt;
  return std::pair(py::cast<at::Tensor>(pair[0]), py::cast<at::Tensor>(pair[1]));
}

Returned with_text(const py::object& returned, bool return_lse) {
  if (!return_lse)
    if (const auto outs = pair_of(returned)) return Returned({outs->first, {}}, outs->second);
  if (py::isinstance<py::tuple>(returned) && py::len(returned) == 2) {
    const auto pair = py::cast<py::tuple>(returned);
    const auto outs = pair_of(pair[0]), lses = pair_of(pair[1]);
    if (outs && lses) return Returned({outs->first, lses->first}, outs->second, lses->second);
  }
  if (is_tensor(returned)) return Returned({py::cast<at::Tensor>(returned), {}});  // the doctor says what is missing
  throw py::type_error("with joint tokens the call returned " + type_name(returned) +
                       " instead of (out, joint_out), or ((out, joint_out), (lse, joint_lse))");
}

Returned result_of(const py::object& returned, const Case& c) {
  if (c.text_len > 0) return with_text(returned, c.return_lse);
  if (const auto pair = pair_of(returned)) return Returned({pair->first, pair->second});
  if (is_tensor(returned)) return Returned({py::cast<at::Tensor>(returned), {}});
  throw py::type_error("the call returned " + type_name(returned) + " instead of a tensor like q, or (out, lse)");
}

doctor::Target python_target(const py::function& function) {
  // Released with the lock held, whichever thread lets go of it last.
  const std::shared_ptr<py::function> shared(new py::function(function), [](py::function* held) {
    const py::gil_scoped_acquire gil;
    delete held;
  });
  return [shared](const RankCall& call, const exchange::Group& group) -> Returned {
    const py::gil_scoped_acquire gil;
    try {
      return result_of((*shared)(call.q, call.k, call.v, group.process_group(), call), call.c);
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
  case_class.def_property_readonly("has_even_shards", &Case::has_even_shards);
  // (q, kv) as MaskLayout names them, and whether a call must be told.
  case_class.def_property_readonly("mask_words", [](const Case& c) {
    const doctor::MaskWords words = doctor::mask_words(c);
    return py::make_tuple(words.q, words.kv, words.ambiguous);
  });
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
      .def_property_readonly("mask", [](const RankCall& call) { return given(call.mask); })
      .def_property_readonly("sinks", [](const RankCall& call) { return given(call.sinks); })
      .def_property_readonly("text", [](const RankCall& call) {
        return Tensors{given(call.text_q), given(call.text_k), given(call.text_v)};
      });
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

// What the tests of the doctor itself ask.
void bind_checks(py::module_& module) {
  module.def(
      "judge_case",  // its result alone: examine_case says why, too
      [](doctor::Ranks& ranks, const Case& c) {
        doctor::CaseResult result{c, {}, doctor::kNoFinding};
        {
          const py::gil_scoped_release no_gil;
          result.verdict = doctor::Examiner(ranks).check(c);
        }
        return dict_of(result);
      },
      py::arg("ranks"), py::arg("case"));
  module.def("options_of", [](const Case& c) { return dict_of(doctor::options_of(c)); });
  // What the arguments of torch.ops.ulysses.attention behind its group say.
  module.def("options_of_request",
             [](const std::vector<int64_t>& lengths, const std::vector<int64_t>& padded_lengths,
                const std::vector<int64_t>& kv_lengths, const std::vector<int64_t>& kv_padded_lengths, bool is_causal,
                std::optional<double> softmax_scale, bool return_lse, const std::string& config) {
               return dict_of(op_call(lengths, padded_lengths, kv_lengths, kv_padded_lengths, is_causal, softmax_scale,
                                      return_lse, config)
                                  .options());
             });
  module.def("record_executed", &processors::record_executed, py::arg("on"));
  // (strategy, feature) -> (calls, calls that train) since record_executed(True).
  module.def("executed", [] {
    std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>> counts;
    for (const auto& [cell, calls] : processors::executed())
      counts[{cell.first, std::string(contract::to_string(cell.second))}] = {calls.all, calls.training};
    return counts;
  });
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
  bind_checks(module);
}

}  // namespace ulysses::bindings
