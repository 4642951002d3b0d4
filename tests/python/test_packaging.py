"""The package as others meet it: find_package(ulysses) from C++, pip install from source."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEV = ROOT / "build" / "dev"
SITE_PACKAGES = sysconfig.get_path("purelib")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command outside the checkout's own settings; its output is the message when it fails."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `cmake --install` put the dev build."""
    path = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", DEV, "--prefix", path)
    return path


def configure(source: Path, build: Path, prefix: Path) -> None:
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DPython_EXECUTABLE={sys.executable}")  # fmt: skip


def test_examples_build_outside_the_tree(prefix: Path, tmp_path: Path) -> None:
    configure(ROOT / "examples" / "cpp", tmp_path, prefix)
    run("cmake", "--build", tmp_path)
    run(tmp_path / "demo-cpp")


def test_core_alone_needs_no_torch(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text(
        '#include "ulysses/contract/policy.h"\n'
        "using Policy = ulysses::contract::UlyssesContextParallelPolicy;\n"
        "int main() { return Policy{}.padded_seq_len(3000, 4) == 3008 ? 0 : 1; }\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(core_only CXX)\n"
        "find_package(ulysses 0.1 REQUIRED COMPONENTS core)\n"
        "add_executable(core_only main.cpp)\ntarget_link_libraries(core_only ulysses::core)\n"
    )
    run("cmake", "-S", tmp_path, "-B", tmp_path / "out", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DPython_EXECUTABLE=/nonexistent")  # fmt: skip
    run("cmake", "--build", tmp_path / "out")
    run(tmp_path / "out" / "core_only")
    assert "torch" not in run("ldd", tmp_path / "out" / "core_only").stdout


def test_find_package_refuses_another_torch(prefix: Path, tmp_path: Path) -> None:
    header = tmp_path / "torch" / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("".join(f"#define TORCH_VERSION_{part} 99\n" for part in ("MAJOR", "MINOR", "PATCH")))
    command = ["cmake", "-S", ROOT / "examples" / "cpp", "-B", tmp_path / "out", f"-DCMAKE_PREFIX_PATH={prefix}",
               "-G", "Ninja", f"-DULYSSES_TORCH_DIR={tmp_path / 'torch'}"]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode != 0
    assert "but torch 99.99.99" in " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the package installed by pip from this checkout."""
    path = tmp_path_factory.mktemp("venv")
    venv.create(path, with_pip=True)
    python = path / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    # The dependencies as they stand in the running environment; nothing is downloaded. Python does not follow .pth
    # files of a folder added like this, so the dev build is not on the path.
    (site / "dependencies.pth").write_text(SITE_PACKAGES + "\n")
    # The compiler and flags of the dev build, so that ccache has most of it.
    run(
        *(python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"),
        *("-C", "cmake.define.ULYSSES_WERROR=ON", ROOT),
        CXX="c++",
        CCACHE_BASEDIR=str(ROOT),
        CCACHE_NOHASHDIR="1",
    )
    return path / "bin"


def test_pip_install_imports_and_runs(installed: Path, tmp_path: Path) -> None:
    code = (
        "import torch, ulysses_attention as u\n"
        "assert 'site-packages' in u.__file__, u.__file__\n"
        "q = torch.randn(1, 6, 2, 8, dtype=torch.float64)\n"
        "out = u.run_ranks(lambda rank, group: u.ulysses_attention(q[:, 3 * rank : 3 * rank + 3], "
        "q[:, 3 * rank : 3 * rank + 3], q[:, 3 * rank : 3 * rank + 3], group, 2), 2)\n"
        "h = q.transpose(1, 2)\n"
        "expected = (torch.softmax(h @ h.transpose(2, 3) / 8**0.5, -1) @ h).transpose(1, 2)\n"
        "assert (torch.cat(out, 1) - expected).abs().max() < 1e-12\n"
    )
    script = tmp_path / "use.py"
    script.write_text(code)
    run(installed / "python", script)


def test_pip_install_brings_the_command(installed: Path) -> None:
    assert "pad to 3008" in run(installed / "ulysses", "guide").stdout


def test_pip_install_brings_the_pytest_plugin(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "plugin.py"
    script.write_text(
        "from importlib.metadata import distribution\n"
        "plugins = distribution('ulysses-attention').entry_points.select(group='pytest11')\n"
        "assert [(plugin.name, plugin.value) for plugin in plugins] == [('ulysses', 'ulysses_pytest')]\n"
    )
    run(installed / "python", script)
    (tmp_path / "test_built_in.py").write_text(
        "from ulysses_attention.pytest_plugin import ulysses_conformance\n"
        "test_built_in = ulysses_conformance('ulysses', worlds=(2,), quick=True)\n"
    )
    done = run(installed / "python", "-m", "pytest", "--ulysses-cases=is_causal/*", "--rootdir", tmp_path, tmp_path)
    assert " 2 passed" in done.stdout.splitlines()[-1], done.stdout


def test_pip_install_brings_the_files_of_the_doctors_page(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(
        f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\n"
        "from sample_report import SENTENCE, sample\n"
        "from ulysses_attention.doctor import html\n"
        "assert 'site-packages' in html.__file__, html.__file__\n"
        "assert SENTENCE in html.render_html(sample())\n"
    )
    run(installed / "python", script)


def test_another_torch_version_is_a_clear_error_at_import(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text("import torch\ntorch.__version__ = '2.99.0'\nimport ulysses_attention\n")
    done = subprocess.run([installed / "python", script], capture_output=True, text=True)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "2.99.0" in last and "CP070" in last
