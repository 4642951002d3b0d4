"""torch.compile of parallelized models of diffusers, over two Gloo ranks: no graph break, equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache

from pipelines import flux_transformer, wan_transformer
from ulysses_attention.diffusers import parallelize
from ulysses_attention.launch import ProcessRanks

pytestmark = pytest.mark.slow

Gloo = Callable[[int], ProcessRanks]
MODELS = {"flux": flux_transformer, "wan": wan_transformer}


def arguments(name: str, width: int) -> dict[str, Any]:
    """Flux: 3 · width image tokens and width of text; Wan: 6 · width of video, and 7 of text."""
    g = torch.Generator().manual_seed(width)
    if name == "wan":
        return {
            "hidden_states": torch.randn(2, 4, 3, 4, 2 * width, generator=g),
            "encoder_hidden_states": torch.randn(2, 7, 8, generator=g),
            "timestep": torch.tensor([300.0, 700.0]),
        }
    places = torch.stack([torch.zeros(3 * width), torch.arange(3 * width) // width, torch.arange(3 * width) % width])
    return {
        "hidden_states": torch.randn(2, 3 * width, 4, generator=g),
        "img_ids": places.T,
        "encoder_hidden_states": torch.randn(2, width, 8, generator=g),
        "txt_ids": torch.zeros(width, 3),
        "pooled_projections": torch.randn(2, 8, generator=g),
        "timestep": torch.tensor([0.3, 0.7]),
    }


def out_and_grads(call: Any, model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    out = call(**inputs, return_dict=False)[0]
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def largest_error(pairs: Any) -> float:
    """In units of each tensor's largest entry."""
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-6)).item() for a, b in pairs)


def compare(
    rank: int, group: Any, name: str, way: str, widths: list[int], layers: int = 2
) -> tuple[list[float], list[int]]:
    """Per width: the error of the compiled model against the eager one, and how often was compiled so far."""
    torch._dynamo.reset()
    model, counter = MODELS[name](layers), CompileCounterWithBackend("aot_eager")
    with parallelize(model, group):
        eager = [out_and_grads(model, model, arguments(name, width)) for width in widths]
        call = model
        if way == "blocks":
            model.compile_repeated_blocks(fullgraph=True, backend=counter)
        else:
            call = torch.compile(model, fullgraph=True, backend=counter)
        errors, counts = [], []
        for width, wanted in zip(widths, eager, strict=True):
            errors.append(largest_error(zip(out_and_grads(call, model, arguments(name, width)), wanted, strict=True)))
            counts.append(counter.frame_count)
    return errors, counts


#: Of blocks: those of Flux are double-stream, and single-stream with two kinds of strides, as on one process; those of
#: Wan the first, whose tokens are a part of a larger tensor, and the others. What shards is a graph of its own.
GRAPHS = {("flux", "blocks"): 3, ("wan", "blocks"): 1 + 2, ("flux", "model"): 1 + 1, ("wan", "model"): 1}


@pytest.mark.parametrize(("name", "way"), GRAPHS)
def test_fullgraph_equals_eager_and_another_length_compiles_once_more(gloo: Gloo, name: str, way: str) -> None:
    for errors, counts in gloo(2).run(compare, name, way, [7, 9], timeout_s=400.0):
        assert max(errors) <= 1e-5
        assert counts[0] == GRAPHS[name, way]
        assert counts[1] <= 2 * counts[0]


def compilations(rank: int, group: Any, name: str) -> list[int]:
    return [compare(rank, group, name, "blocks", [7], layers)[1][0] for layers in (2, 4)]


@pytest.mark.parametrize("name", MODELS)
def test_alike_blocks_share_one_compiled_code(gloo: Gloo, name: str) -> None:
    for counts in gloo(2).run(compilations, name, timeout_s=400.0):
        assert len(set(counts)) == 1, counts


def inductor(rank: int, group: Any) -> float:
    torch._dynamo.reset()
    model = flux_transformer(layers=1, single_layers=1)
    with parallelize(model, group), fresh_cache():  # the cache on disk knows nothing of a change in our own shapes
        wanted = out_and_grads(model, model, arguments("flux", 7))
        model.single_transformer_blocks[0].compile(fullgraph=True, backend="inductor")
        return largest_error(zip(out_and_grads(model, model, arguments("flux", 7)), wanted, strict=True))


def test_inductor_equals_eager(gloo: Gloo) -> None:
    for error in gloo(2).run(inductor, timeout_s=400.0):
        assert error <= 1e-4
