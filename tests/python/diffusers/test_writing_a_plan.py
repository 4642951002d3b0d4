"""The complete example of docs/diffusers.md runs, and says what stands below it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from diffusers import PixArtTransformer2DModel

from conftest import REPOSITORY
from ulysses_attention.diffusers import FAMILIES

PAGE = (REPOSITORY / "docs" / "diffusers.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
VERDICT = re.compile(r"output: (\S+) of the largest, gradients: (\S+) \(each may be 1e-03\): (.*)")


def run(source: str, folder: Path) -> tuple[float, float, str, str]:
    """What verify printed: the errors of output and gradients, the verdict, and the lines below it."""
    path = folder / "plan.py"
    path.write_text(source)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *more = done.stdout.splitlines()
    found = VERDICT.fullmatch(first)
    assert found, done.stdout
    return float(found[1]), float(found[2]), found[3], "\n".join(more)


def test_the_plan_of_the_page_gives_the_same_model(tmp_path: Path) -> None:
    assert PixArtTransformer2DModel.__name__ not in FAMILIES
    assert getattr(PixArtTransformer2DModel, "_cp_plan", None) is None
    output, gradients, verdict, more = run(EXAMPLE, tmp_path)
    shown = VERDICT.fullmatch(EXAMPLE.splitlines()[-1].removeprefix("# "))
    assert shown and verdict == shown[3] == "the same model" and not more
    assert max(output, gradients, float(shown[1]), float(shown[2])) <= 1e-5


def test_a_plan_that_leaves_the_attention_local_is_not_the_same_model(tmp_path: Path) -> None:
    wrong = EXAMPLE.replace('Attend(("image",)),', '"local",')
    assert wrong != EXAMPLE
    output, gradients, verdict, more = run(wrong, tmp_path)
    assert verdict == "NOT the same model" and output > 1e-2 and gradients > 1e-2
    assert "wrong gradient: transformer_blocks.0.attn1.to_q.weight" in more
