"""The layer check finds what it is there for, and the tree is clean."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_layers.py"


def check(root: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_tree_keeps_its_layers() -> None:
    assert check(ROOT) == (0, "")


@pytest.mark.parametrize(
    ("name", "include", "words"),
    [
        ("base/a.h", '"ulysses/contract/policy.h"', "base may not include ulysses/contract/policy.h"),
        ("contract/a.cpp", '"ulysses/partition/x.h"', "contract may not include ulysses/partition/x.h"),
        ("transports/thread/a.cpp", '"ulysses/exchange/group.h"', "transports may not include"),
        ("kernels/a.cpp", '"ulysses/exchange/group.h"', "kernels may not include"),
        ("strategy/a.h", '"ulysses/processors/registry.h"', "strategy may not include"),
        ("processors/a.h", '"ulysses/bindings/ops.h"', "processors may not include"),
        ("partition/a.cpp", "<ATen/core/Tensor.h>", "partition is torch-free"),
        ("base/a.cpp", "<c10/util/Exception.h>", "base is torch-free"),
        ("contract/a.cpp", "<torch/library.h>", "contract is torch-free"),
        ("strategy/a.cpp", "<torch/csrc/distributed/c10d/Types.hpp>", "use exchange::Group"),
        ("kernels/a.cpp", "<ATen/ATen.h>", "umbrella header"),
        ("bindings/a.cpp", "<torch/extension.h>", "umbrella header"),
        ("exchange/a.h", "<torch/csrc/distributed/c10d/ProcessGroup.hpp>", "stays out of our headers"),
        ("strategy/a.h", "<torch/csrc/autograd/custom_function.h>", "stays out of our headers"),
        ("strategy/a.cpp", '"helper.h"', "is not of the form"),
        ("extras/a.cpp", "<vector>", "extras is not a known folder"),
        ("ulysses.h", '"ulysses/bindings/ops.h"', "ulysses.h may not include"),
        ("ulysses.h", "<torch/csrc/distributed/c10d/ProcessGroup.hpp>", "stays out of our headers"),
    ],
)
def test_a_bad_include_is_found(tmp_path: Path, name: str, include: str, words: str) -> None:
    write(tmp_path, f"src/ulysses/{name}", f"#pragma once\n\n# include {include}\n")
    status, output = check(tmp_path)
    assert status == 1
    assert f"src/ulysses/{name}" in output
    assert words in output
    assert len(output.splitlines()) == 1


def test_good_includes_pass(tmp_path: Path) -> None:
    write(tmp_path, "src/ulysses/partition/a.cpp", '#include "ulysses/base/error.h"\n#include <vector>\n')
    write(
        tmp_path,
        "src/ulysses/strategy/a.cpp",
        '#include <torch/csrc/autograd/custom_function.h>\n#include "ulysses/partition/head_ranges.h"\n'
        '#include "ulysses/kernels/kernel.h"\n#include "ulysses/exchange/group.h"\n',
    )
    write(tmp_path, "src/ulysses/exchange/a.cpp", "#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>\n")
    assert check(tmp_path) == (0, "")


def cpp_function(lines: int) -> str:
    body = "".join(f'  if (x > {i}) {{ x += "}}"[0]; }}  // {{ not code\n' for i in range(lines - 2))
    return f"namespace a {{\nint long_one(int x) {{\n{body}}}\n}}  // namespace a\n"


def python_function(lines: int) -> str:
    return 'def f(\n    not_counted,\n):\n    """Not\n    counted."""\n' + "    x = 1\n" * lines


@pytest.mark.parametrize(("name", "make"), [("src/ulysses/base/a.cpp", cpp_function), ("python/a.py", python_function)])
def test_a_function_over_60_lines_is_found(tmp_path: Path, name: str, make) -> None:
    write(tmp_path, name, make(60))
    assert check(tmp_path) == (0, "")
    write(tmp_path, name, make(61))
    status, output = check(tmp_path)
    assert status == 1
    assert "function of 61 lines" in output


def test_a_long_table_is_no_long_function(tmp_path: Path) -> None:
    rows = "".join(f"      {{{i}, [] {{ return {i}; }}}},\n" for i in range(100))
    write(tmp_path, "src/ulysses/base/a.cpp", f"std::vector<Row> rows() {{\n  return {{\n{rows}  }};\n}}\n")
    assert check(tmp_path) == (0, "")


def test_a_file_over_400_lines_is_found(tmp_path: Path) -> None:
    write(tmp_path, "tests/a.py", "x = 1\n" * 400)
    assert check(tmp_path) == (0, "")
    write(tmp_path, "tests/a.py", "x = 1\n" * 401)
    status, output = check(tmp_path)
    assert (status, "tests/a.py: 401 lines" in output) == (1, True)
