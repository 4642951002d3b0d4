"""The demo, short: the files it writes and the claims recomputed from them. The full claim: `make demo`."""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import pytest
import torch

from ulysses_attention import demo
from ulysses_attention.demo import task

STEPS = 20


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, pathlib.Path]:
    out = tmp_path_factory.mktemp("demo")
    return demo.main(["--steps", str(STEPS), "--min-gap", "-1", "--out", str(out)]), out


@pytest.fixture
def report(finished: tuple[int, pathlib.Path]) -> Any:
    return json.loads((finished[1] / "demo.json").read_text(encoding="utf-8"))


def test_our_curve_lies_on_the_single_process_one(finished: tuple[int, pathlib.Path], report: Any) -> None:
    assert finished[0] == 0
    single, ours, local = (report["losses"][run] for run in ("single", "ulysses", "local_kv"))
    assert len(single) == len(ours) == len(local) == STEPS
    assert max(abs(a - b) for a, b in zip(single, ours, strict=True)) < 1e-4
    assert max(abs(a - b) for a, b in zip(single, local, strict=True)) > 1e-4  # else the runs would not differ at all
    assert demo.verify_report(report, min_gap=-1) == []
    assert (finished[1] / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_claims_that_do_not_hold_are_named(report: Any) -> None:
    assert any("local K/V ends only" in claim for claim in demo.verify_report(report))  # 20 steps are too few
    bent = copy.deepcopy(report)
    bent["losses"]["ulysses"][7] += 1e-3
    assert any("leaves the single-process curve" in claim for claim in demo.verify_report(bent, min_gap=-1))
    lost = copy.deepcopy(report)
    lost["losses"]["ulysses"][7] = float("nan")
    assert demo.verify_report(lost, min_gap=-1)
    short = copy.deepcopy(report)
    short["losses"]["local_kv"].pop()
    assert demo.verify_report(short, min_gap=-1) == [f"local_kv: {STEPS - 1} losses for {STEPS} steps"]
    edited = copy.deepcopy(report)
    edited["gap"] += 1.0
    assert any(claim.startswith("gap=") for claim in demo.verify_report(edited, min_gap=-1))


def test_threads_give_the_same_curves_and_a_missing_gap_is_exit_1(report: Any, tmp_path: pathlib.Path) -> None:
    assert demo.main(["--steps", str(STEPS), "--threads", "--out", str(tmp_path)]) == 1
    threads = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    for run, curve in report["losses"].items():
        assert threads["losses"][run] == pytest.approx(curve, abs=1e-4)


def test_what_one_copy_hides_another_shows() -> None:
    batch = task.make_batch(task.load_text(), seed=3, batch=8)
    hidden = batch.hidden.view(8, task.COPIES, task.PASSAGE)
    assert (hidden.sum(dim=2) == task.PASSAGE // 2).all()  # each copy hides its own half
    assert (hidden.sum(dim=1) == task.COPIES // 2).all()
    copies = batch.targets.view(8, task.COPIES, task.PASSAGE)
    assert (copies == copies[:, :1]).all()
    assert torch.equal(batch.tokens == task.MASK, batch.hidden)
    assert torch.equal(batch.tokens[~batch.hidden], batch.targets[~batch.hidden])
