#pragma once

#include <pybind11/pybind11.h>

namespace ulysses::bindings {

void bind_contract(pybind11::module_& module);    // policy, layout, checks, guide: torch-free
void bind_transports(pybind11::module_& module);  // thread ranks, shared memory, recording
void bind_processors(pybind11::module_& module);  // UlyssesAttentionProcessor for subclasses, registry
void bind_doctor(pybind11::module_& module);      // check_attention
void bind_examine(pybind11::module_& module);     // the doctor's cases, ranks and report

}  // namespace ulysses::bindings
