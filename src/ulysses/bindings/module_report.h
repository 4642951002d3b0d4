#pragma once

#include <pybind11/pybind11.h>

#include "ulysses/contract/attention_spec.h"
#include "ulysses/doctor/report.h"

namespace ulysses::bindings {

// The fields of a case that are not as in a plain one.
pybind11::dict fields_of(const doctor::Case& c);

// Options of a call, those that differ between calls: for the test that holds both ways of making them together.
pybind11::dict dict_of(const contract::AttentionOptions& options);

// The report, and its parts, as the JSON-able dict that docs/doctor-report.md describes.
pybind11::dict dict_of(const doctor::CaseResult& result);
pybind11::dict dict_of(const doctor::ProbeResult& result);
pybind11::dict dict_of(const doctor::Finding& finding);
pybind11::dict dict_of(const doctor::ReachPicture& picture);
pybind11::dict dict_of(const doctor::Report& report);

}  // namespace ulysses::bindings
