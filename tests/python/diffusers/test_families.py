"""Every family that has a plan, over ranks: output and gradients of one process, and no trace afterwards."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch

from families import FAMILIES, LATE, TEXT
from same_model import call_without_gradient, family, one_process, over_threads
from ulysses_attention import _C, SequenceLayout, UlyssesContextParallelPolicy, diffusers, run_ranks

EXACT = UlyssesContextParallelPolicy(require_seq_divisible=False)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "z_image_30_heads"])
def test_same_model_on_ranks(name: str, world: int) -> None:
    over_threads(family(name), world)


def test_z_image_with_its_30_heads_on_4_ranks() -> None:
    over_threads(family("z_image_30_heads"), 4)


def test_every_plan_is_tested() -> None:
    assert {entry.kind for entry in FAMILIES.values()} == set(diffusers.FAMILIES)


def test_ltx2_with_its_first_frame_marked() -> None:
    """Where the installed version marks frames at all."""
    entry = FAMILIES["ltx2"]
    marks = "video_keyframes_mask" in inspect.signature(type(entry.model()).forward).parameters
    if marks:
        entry = dataclasses.replace(entry, config={**entry.config, "use_keyframes_abs_pos_embedding": True})
    model, inputs = entry.model(), entry.inputs(TEXT, True)
    mask = {"video_keyframes_mask": (~LATE).float()[None, :, None].expand(2, -1, -1)} if marks else {}
    wanted = one_process(model, {**inputs, **mask})
    moved = (wanted.out - call_without_gradient(model, inputs)).abs().max()
    assert bool(moved > 1e-2) is marks
    over_threads(wanted, 2)


@pytest.mark.parametrize("name", ["flux", "chroma", "wan", "ltx2", "lumina2"])
def test_same_model_by_gathered_keys(name: str) -> None:
    over_threads(family(name), 2, strategy="allgather_kv")


@pytest.mark.parametrize("name", ["qwen", "hunyuan", "sd3"])
def test_same_model_by_the_math_kernel(name: str) -> None:
    over_threads(family(name), 2, kernel="math")


def _sent(group: Any, model: torch.nn.Module, inputs: dict[str, Any], plan: diffusers.ShardingPlan) -> int:
    recorder = _C.Recorder()
    with diffusers.parallelize(model, _C.record_group(group, recorder), plan=plan, agreement="off"):
        call_without_gradient(model, inputs)
    return sum(record.bytes_sent for record in recorder.records())


def test_lumina_sends_each_key_once() -> None:
    """4 query heads share 2 of keys: the model repeats them before its attention, which must not travel."""
    world, wanted = 2, family("lumina2", masked=False)
    plan = diffusers.FAMILIES["Lumina2Transformer2DModel"]
    models = [copy.deepcopy(wanted.model) for _ in range(world)]

    def sent_by_attention(rank: int, group: Any) -> int:
        local_only = dataclasses.replace(plan, attention={"**": "local"})
        whole, border = (_sent(group, models[rank], wanted.inputs, x) for x in (plan, local_only))
        return whole - border

    for rank, sent in enumerate(run_ranks(sent_by_attention, world)):
        layers = [SequenceLayout(tokens, world, EXACT).lengths for tokens in (15, 22, 22)]  # refiner, 2 joint layers
        by_kv_heads = {
            kv_heads: sum(_C.ulysses_forward_traffic(x, x, 2, 4, kv_heads, 16, 4, rank)[1] for x in layers)
            for kv_heads in (2, 4)
        }
        assert sent == by_kv_heads[2] < by_kv_heads[4]
