"""Time of a whole Flux model on two Gloo ranks: ours against diffusers' own context parallelism, in turns.

One double-stream and one single-stream block, 24 heads of 128, 1024 image tokens, 76 text tokens, and 77 for ours
alone: over Gloo diffusers' plain mode needs lengths that divide, and its "anything" mode has no backward. Each rank has
one thread. The rounds go there and back (ours, theirs, all but attention, and the same backwards), so that a machine
that slows down slows all; trust the ratio. Seconds are those of the clock, and of the processor, which other programs
disturb less.

"All but attention" is a rank's share of the tokens through the same model, with an attention that adds q, k and v and
sends nothing: the time that no attention, however fast, can get below.

Usage: python bench/diffusers_flux.py [float32|bfloat16] [rounds]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from diffusers.models.transformers import transformer_flux
from torch.distributed.device_mesh import init_device_mesh

from ulysses_attention import run_processes
from ulysses_attention.diffusers import parallelize

LAYERS, SINGLE_LAYERS, HEADS, HEAD_DIM, TEXT_DIM = 1, 1, 24, 128, 64
IMAGE, TEXT, ODD_TEXT = 1024, 76, 77
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
OURS, THEIRS, ODD = "ours", "diffusers", f"ours, {ODD_TEXT} text tokens"
ALL_BUT_ATTENTION = "all but attention"
ROUND = (OURS, THEIRS, ALL_BUT_ATTENTION, ALL_BUT_ATTENTION, THEIRS, OURS)
CLOCKS = {"clock": time.perf_counter, "processor": time.process_time}


class AllButAttention:
    """The model with an attention that takes next to no time and still has a gradient for each of q, k and v."""

    def __init__(self, model: Any) -> None:
        self.model, self.zero_grad = model, model.zero_grad

    def __call__(self, **inputs: Any) -> Any:
        with mock.patch.object(transformer_flux, "dispatch_attention_fn", lambda q, k, v, **_: q + k + v):
            return self.model(**inputs)


def build(dtype: torch.dtype) -> dict[str, Any]:
    """Three models over the same weights."""
    torch.manual_seed(0)
    config = {"num_layers": LAYERS, "num_single_layers": SINGLE_LAYERS, "attention_head_dim": HEAD_DIM}
    config |= {"num_attention_heads": HEADS, "joint_attention_dim": TEXT_DIM, "pooled_projection_dim": 64}
    ours = FluxTransformer2DModel(**config).to(dtype)
    models = {OURS: ours}
    for way in (THEIRS, ALL_BUT_ATTENTION):
        with torch.device("meta"):
            models[way] = FluxTransformer2DModel(**config)
        models[way].load_state_dict(ours.state_dict(), assign=True)
    return models | {ALL_BUT_ATTENTION: AllButAttention(models[ALL_BUT_ATTENTION])}


def inputs_of(image_tokens: int, text_tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    place = torch.arange(image_tokens).float()
    return {
        "hidden_states": torch.randn(1, image_tokens, 64, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(1, text_tokens, TEXT_DIM, generator=generator).to(dtype),
        "pooled_projections": torch.randn(1, 64, generator=generator).to(dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": torch.stack([torch.zeros_like(place), place // 32, place % 32], 1),
        "txt_ids": torch.zeros(text_tokens, 3),
    }


def forward(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def forward_and_backward(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    out = model(**inputs, return_dict=False)[0]
    out.square().mean().backward()
    return out.detach()


PASSES = {"forward": forward, "forward + backward": forward_and_backward}


def seconds(run: Callable[..., torch.Tensor], model: Any, inputs: dict[str, torch.Tensor], group: Any) -> list[float]:
    """Time of one pass by each of CLOCKS, from a common start to this rank's end."""
    group.barrier().wait()
    start = [clock() for clock in CLOCKS.values()]
    run(model, inputs)
    end = [clock() for clock in CLOCKS.values()]
    model.zero_grad(set_to_none=True)
    return [b - a for a, b in zip(start, end, strict=True)]


def measure(rank: int, group: Any, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """pass -> way -> [clock, processor] of each run, of this rank."""
    torch.set_num_threads(1)
    models = build(dtype)
    share = (IMAGE // group.size(), TEXT // group.size())
    tokens = {OURS: (IMAGE, TEXT), THEIRS: (IMAGE, TEXT), ALL_BUT_ATTENTION: share, ODD: (IMAGE, ODD_TEXT)}
    inputs = {way: inputs_of(*counts, dtype) for way, counts in tokens.items()}
    whole = forward(models[OURS], inputs[OURS])
    parallelize(models[OURS], group)
    mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("ring", "ulysses"))
    with mock.patch("torch.accelerator.device_count", return_value=1):  # 0 without a GPU, by which it divides
        models[THEIRS].enable_parallelism(config=ContextParallelConfig(ulysses_degree=group.size(), mesh=mesh))
    forward(models[ALL_BUT_ATTENTION], inputs[ALL_BUT_ATTENTION])
    for way in (OURS, THEIRS):  # warm, and right
        error = float((forward(models[way], inputs[way]) - whole).abs().max() / whole.abs().max())
        assert error < TOLERANCE[dtype], f"{way}: {error}"
    models[ODD] = models[OURS]
    found: dict[str, Any] = {name: {way: [] for way in models} for name in PASSES}
    for _ in range(rounds):
        for name, run in PASSES.items():
            for way in (*ROUND, ODD):
                found[name][way].append(seconds(run, models[way], inputs[way], group))
    return found


def report(results: list[dict[str, Any]]) -> None:
    """Of each run the slower rank counts; of each round the two runs of one way against the two of diffusers."""
    for name in PASSES:
        for place, clock in enumerate(CLOCKS):
            times = {way: [max(r[name][way][i][place] for r in results) for i in range(len(runs))]
                     for way, runs in results[0][name].items()}  # fmt: skip
            medians = ", ".join(f"{way} {statistics.median(seconds):.3f}" for way, seconds in times.items())
            print(f"{name}, seconds of the {clock}: {medians}")
            for way in (OURS, ALL_BUT_ATTENTION):
                rounds = range(0, len(times[way]), 2)
                ratios = sorted(sum(times[way][i : i + 2]) / sum(times[THEIRS][i : i + 2]) for i in rounds)
                spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
                print(f"    {way} / diffusers {spread}", flush=True)


if __name__ == "__main__":
    dtype = getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "float32")
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    print(f"{LAYERS} + {SINGLE_LAYERS} blocks, {IMAGE} + {TEXT} tokens, {dtype}, torch {torch.__version__}")
    report(run_processes(measure, 2, dtype, rounds, timeout_s=3600.0))
