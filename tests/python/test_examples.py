"""Every example runs and says that what it shows is so."""

from __future__ import annotations

import re
import subprocess
import sys

from conftest import REPOSITORY


def _run(name: str, limit_s: float) -> str:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / name)], capture_output=True, text=True, timeout=limit_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_reproduce_shows_the_length_error_and_the_silent_one() -> None:
    text = _run("reproduce.py", limit_s=120)
    assert "3000 -> 3008" in text and re.search(r"ValueError: .*3008", text)
    wrong, right = (float(x) for x in re.findall(r"largest error (\S+?),? ", text.replace("\n", " ")))
    assert wrong > 1e-3 and right <= 1e-5


def test_flux_equals_the_single_process() -> None:
    text = _run("diffusers_flux.py", limit_s=300)
    ours = [float(x) for x in re.findall(r"FluxProcessor +(\S+)\n", text)]
    local = [float(x) for x in re.findall(r"local K/V +(\S+),", text)]
    assert len(ours) == len(local) == 2
    assert max(ours) <= 1e-5 and min(local) > 1e-2
