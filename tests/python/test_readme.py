"""Every command and snippet of the README runs, and shows what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from conftest import REPOSITORY
from pipelines import save_flux
from training_cases import (
    causal_attention,
    dropout_of,
    layouts_of,
    loss_of_one_process,
    new_batch,
    new_decoder,
    sharded_attention,
    whole_dropout,
)
from ulysses_attention import run_ranks

README = (REPOSITORY / "README.md").read_text()
DEV = REPOSITORY / "build" / "dev"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def run(*command: object, cwd: Path = REPOSITORY) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{DEV / 'tools'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=cwd, env={**os.environ, "PATH": path}
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout if done.returncode == 0 else f"exit 1\n{done.stdout}{done.stderr}"


def script(text: str, folder: Path) -> Path:
    path = folder / "snippet.py"
    path.write_text(text)
    return path


def snippet(part: str) -> str:
    (found,) = [block for block in blocks("python") if part in block]
    return found


def test_every_python_snippet_is_short_and_run_by_a_test_here() -> None:
    assert [len(block.splitlines()) <= 15 for block in blocks("python")] == [True] * 9
    assert [len(block.splitlines()) <= 15 for block in blocks("cpp")] == [True]


@pytest.mark.parametrize("world", [2, 3])
def test_training_snippet_runs_under_torchrun(world: int, tmp_path: Path) -> None:
    source = snippet("train.py").replace("64)", "8)")  # a smaller head: the point is that it runs
    shown = source.replace(
        "dist.destroy", "print(f'rows {out.shape[1]} {k.grad is not None}\\n', end='')\ndist.destroy"
    )
    text = run("torchrun", "--standalone", "--nproc-per-node", world, script(shown, tmp_path))
    # torch 2.13's Gloo now and then aborts a process that has finished (a program that only calls all_to_all_single
    # shows it too); the ranks have said by then what this test asks.
    assert not text.startswith("exit 1") or "terminate called without an active exception" in text, text
    assert text.count(f"rows {(3001 // (8 * world) + 1) * 8} True") == world, text


@pytest.mark.parametrize("world", [1, 2, 3])
def test_micro_batch_snippet_has_the_loss_and_the_gradients_of_one_process(world: int) -> None:
    names: dict[str, Any] = {}
    exec(snippet("def loss_and_gradients"), names)
    alone, batches = new_decoder(causal_attention, whole_dropout(13)), [new_batch(13, 2, step) for step in range(2)]
    tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = loss_of_one_process(alone, tokens, labels)
    expected.backward()

    def on_rank(rank: int, group: Any) -> tuple[float, list[torch.Tensor]]:
        layout = layouts_of(13, world)["uneven"]
        model = new_decoder(sharded_attention(group, layout), dropout_of(layout, rank))
        own = [tuple(layout.shard(x, rank) for x in batch) for batch in batches]
        loss = names["loss_and_gradients"](model, own, group)
        return loss, [parameter.grad for parameter in model.parameters()]

    for loss, grads in run_ranks(on_rank, world):
        assert abs(loss - expected.item()) < 1e-5
        for got, parameter in zip(grads, alone.parameters(), strict=True):
            assert (got - parameter.grad).abs().max() < 1e-5 < parameter.grad.abs().max()


def test_diffusers_snippet_saves_an_image(tmp_path: Path) -> None:
    save_flux(tmp_path / "model")
    source = snippet("FluxPipeline")
    for shown, here in (
        ('"nccl"', '"gloo"'),
        ('torch.cuda.set_device(device := torch.device("cuda", dist.get_node_local_rank()))', 'device = "cpu"'),
        ("black-forest-labs/FLUX.1-dev", str(tmp_path / "model")),
        ('a horse", ', 'a horse", height=30, width=30, num_inference_steps=2, '),
        ('"flux.png"', f'"{tmp_path / "flux.png"}"'),
    ):
        assert source.count(shown) == 1
        source = source.replace(shown, here)
    text = run("torchrun", "--standalone", "--nproc-per-node", 2, script(source, tmp_path))
    assert not text.startswith("exit 1") or "terminate called without an active exception" in text, text
    assert Image.open(tmp_path / "flux.png").size == (30, 30)


def test_text_snippet_prints_what_stands_below_it(tmp_path: Path) -> None:
    source = snippet("JointTokens")
    assert run(sys.executable, script(source, tmp_path)).strip() == source.rsplit("# ", 1)[1].strip()


def test_check_snippet_prints_what_stands_below_it(tmp_path: Path) -> None:
    source = snippet("check_attention")
    expected = source.splitlines()[-1].removeprefix("# ")
    assert run(sys.executable, script(source, tmp_path)).strip() == expected


def test_backend_snippet_gives_each_rank_its_rows(tmp_path: Path) -> None:
    text = run(sys.executable, script(snippet("register_backend"), tmp_path))
    assert text.strip() == "[torch.Size([1, 8, 4, 16]), torch.Size([1, 8, 4, 16])]"


def test_language_model_snippet_gives_the_gradients_of_one_process(tmp_path: Path) -> None:
    parallel = "parallelize(model, dist.group.WORLD)"
    alone = "model(input_ids=ids, labels=ids).loss.backward()\nalone = [p.grad for p in model.parameters()]\n"
    shown = (
        "error = max((p.grad - g).norm() / g.norm() for p, g in zip(model.parameters(), alone))\n"
        "print(f'error {error <= 1e-4}\\n', end='')\ndist.destroy"
    )
    source = snippet("LlamaForCausalLM").replace(parallel, f"{alone}model.zero_grad()\n{parallel}")
    text = run(
        "torchrun", "--standalone", "--nproc-per-node", 2, script(source.replace("dist.destroy", shown), tmp_path)
    )
    assert not text.startswith("exit 1") or "terminate called without an active exception" in text, text
    assert text.count("error True") == 2, text


def test_doctor_snippet_gets_the_verdicts_that_stand_beside_the_commands(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(snippet("# mine.py"))
    lines = [line for block in blocks("sh") for line in block.splitlines() if "doctor" in line]
    for command, expected in (line.split("  # ") for line in lines):
        text = run(sys.executable, "-m", "ulysses_attention.cli", *command.split()[1:], "--quick", cwd=tmp_path)
        assert text.startswith("exit 1") == (command.split(":")[1] == "wrong"), text
        assert expected in " ".join(text.split()), text


def test_conformance_snippet_is_a_test_suite(tmp_path: Path) -> None:
    (tmp_path / "my_backend.py").write_text(snippet("register_backend"))
    (tmp_path / "test_my_backend.py").write_text(snippet("ulysses_conformance"))
    assert "pytest --ulysses-cases='grouped_kv/*'" in README
    options = ["-p", "ulysses_pytest", "-p", "no:cacheprovider", "--ulysses-cases=grouped_kv/*"]
    text = run(sys.executable, "-m", "pytest", *options, cwd=tmp_path)
    shapes, dtypes, strategies, worlds = 4, 4, 2, 2
    assert f" {shapes * dtypes * strategies * worlds} passed" in text.splitlines()[-1], text


def test_every_shell_command_is_run_by_a_test_here() -> None:
    commands = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines() if line.strip()]
    assert commands == [
        "make demo",  # below
        "make test",  # what runs this test
        "ulysses doctor mine.py:wrong",  # below
        "ulysses doctor mine.py:Right",  # below
        "ulysses check --seq-len 3000 --cp-size 4 --heads 30 --kv-heads 6",  # below
        "ulysses guide",  # below
    ]


def test_check_command_names_a_length_that_works() -> None:
    command = ["check", "--seq-len", "3000", "--cp-size", "4", "--heads", "30", "--kv-heads", "6"]
    text = run(sys.executable, "-m", "ulysses_attention.cli", *command)
    assert text.startswith("exit 1") and "[CP011]" in text and "3008" in text
    assert run("ulysses-check", *command[1:]).splitlines()[1:] == text.splitlines()[1:]


def test_guide_command_prints_the_committed_guide() -> None:
    text = run(sys.executable, "-m", "ulysses_attention.cli", "guide")
    assert text == (REPOSITORY / "docs" / "guide.md").read_text()


@pytest.mark.slow
def test_make_demo_proves_its_claim() -> None:
    picture = REPOSITORY / "demo-out" / "demo.png"
    picture.unlink(missing_ok=True)
    text = run("make", "demo")
    assert not text.startswith("exit 1"), text
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_make_demo_cpp_proves_its_claim() -> None:
    assert "Every run is as it must be." in run("make", "demo-cpp")


@pytest.mark.slow
def test_cpp_snippet_builds_and_runs_outside_the_tree(tmp_path: Path) -> None:
    (source,) = blocks("cpp")
    (cmake,) = blocks("cmake")
    (tmp_path / "main.cpp").write_text(source.replace("3001", "301"))
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(snippet CXX)\nadd_executable(my_program main.cpp)\n" + cmake
    )
    run("cmake", "--install", DEV, "--prefix", tmp_path / "prefix")
    run("cmake", "-S", tmp_path, "-B", tmp_path / "out", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}",
        f"-DPython_EXECUTABLE={sys.executable}")  # fmt: skip
    assert not run("cmake", "--build", tmp_path / "out").startswith("exit 1")
    assert run(tmp_path / "out" / "my_program") == ""
