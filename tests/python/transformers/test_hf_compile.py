"""torch.compile(fullgraph=True) of parallelized models over two Gloo processes: no graph break, the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from tiny_models import Result, alone, assert_same, gathered, grads_of, inputs_of, new_model, summed
from torch._dynamo.testing import CompileCounterWithBackend

from ulysses_attention.launch import ProcessRanks
from ulysses_attention.transformers import parallelize

pytestmark = pytest.mark.slow

Gloo = Callable[[int], ProcessRanks]


def compiled(rank: int, group: Any, what: str, kinds: list[str], backend: str) -> tuple[list[Any], int]:
    """Results of the compiled model, one a kind of input, and how many graphs that took."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    results = []
    model = new_model("llama")
    handle = parallelize(model, group)
    if what == "layers":
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=counter)
    call = torch.compile(model, fullgraph=True, backend=counter) if what == "model" else model
    for kind in kinds:
        given = inputs_of(kind.removesuffix(" placed"))
        if kind.endswith("placed"):
            given["position_ids"] = torch.arange(13)[None] + 3
        out = call(**given)
        out.loss.backward()
        grads = {name: grad.numpy() for name, grad in grads_of(model).items()}
        results.append((out.loss.detach().numpy(), gathered(handle, out.logits).numpy(), grads))
        model.zero_grad()
    return results, counter.frame_count


def result(arrays: Any) -> Result:
    loss, logits, grads = arrays
    return Result(torch.tensor(loss), torch.tensor(logits), {name: torch.tensor(grad) for name, grad in grads.items()})


def assert_compiled_equals_one_process(ranks: ProcessRanks, what: str, kinds: list[str], backend: str) -> list[int]:
    parts = ranks.run(compiled, what, kinds, backend)
    for index, kind in enumerate(kinds):
        given = inputs_of(kind.removesuffix(" placed"))
        got = summed([result(results[index]) for results, _ in parts])
        assert_same(got, alone(new_model("llama"), given), given)
    return [count for _, count in parts]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_equal_one_process(gloo: Gloo, backend: str) -> None:
    kinds = ["plain", "right"] if backend == "aot_eager" else ["right"]
    for count in assert_compiled_equals_one_process(gloo(2), "layers", kinds, backend):
        assert count >= 1  # and fullgraph=True raises at a break


def test_the_compiled_model_equals_one_process(gloo: Gloo) -> None:
    for count in assert_compiled_equals_one_process(gloo(2), "model", ["plain", "left", "plain placed"], "aot_eager"):
        assert count >= 3


def jumps(rank: int, group: Any) -> str:
    torch._dynamo.reset()
    model = new_model("llama")
    parallelize(model, group)
    positions = torch.tensor([[*range(4), *range(9)]]).expand(2, -1)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    try:
        call(input_ids=inputs_of("plain")["input_ids"], position_ids=positions)
    except RuntimeError as error:
        return str(error)
    return ""


def test_cp045_packed_documents_are_refused_by_the_compiled_model(gloo: Gloo) -> None:
    for text in gloo(2).run(jumps):
        assert "[CP045]" in text
