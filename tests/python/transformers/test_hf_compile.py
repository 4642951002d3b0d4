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


def given_for(kind: str) -> dict[str, torch.Tensor]:
    """Inputs by "kind", "kind length", or "kind placed": with positions that begin at 3."""
    name, _, more = kind.partition(" ")
    given = inputs_of(name, int(more) if more.isdigit() else 13)
    return {**given, "position_ids": torch.arange(13)[None] + 3} if more == "placed" else given


def compiled(rank: int, group: Any, what: str, kinds: list[str], backend: str, layers: int) -> tuple[list[Any], int]:
    """Results of the compiled model, one a kind of input, and how many graphs that took."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    results = []
    model = new_model("llama", num_hidden_layers=layers)
    handle = parallelize(model, group)
    if what == "layers":
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=counter)
    call = torch.compile(model, fullgraph=True, backend=counter) if what == "model" else model
    for kind in kinds:
        out = call(**given_for(kind))
        out.loss.backward()
        grads = {name: grad.numpy() for name, grad in grads_of(model).items()}
        results.append((out.loss.detach().numpy(), gathered(handle, out.logits).numpy(), grads))
        model.zero_grad()
    return results, counter.frame_count


def result(arrays: Any) -> Result:
    loss, logits, grads = arrays
    return Result(torch.tensor(loss), torch.tensor(logits), {name: torch.tensor(grad) for name, grad in grads.items()})


def assert_compiled_equals_one_process(
    ranks: ProcessRanks, what: str, kinds: list[str], backend: str = "aot_eager", layers: int = 2
) -> list[int]:
    """The numbers of graphs. A graph break would raise."""
    parts = ranks.run(compiled, what, kinds, backend, layers)
    for index, kind in enumerate(kinds):
        given = given_for(kind)
        got = summed([result(results[index]) for results, _ in parts])
        assert_same(got, alone(new_model("llama", num_hidden_layers=layers), given), given)
    return [count for _, count in parts]


def test_compiled_layers_equal_one_process_for_all_lengths_with_one_graph_more(gloo: Gloo) -> None:
    kinds = ["plain", "plain 9", "plain 16", "plain 11"]
    assert assert_compiled_equals_one_process(gloo(2), "layers", kinds, layers=1) == [2, 2]


def test_compiled_layers_see_padding(gloo: Gloo) -> None:
    assert min(assert_compiled_equals_one_process(gloo(2), "layers", ["right", "left"])) >= 1


def test_inductor_equals_one_process(gloo: Gloo) -> None:
    assert min(assert_compiled_equals_one_process(gloo(2), "layers", ["right"], "inductor", layers=1)) >= 1


def test_the_compiled_model_equals_one_process_for_each_length(gloo: Gloo) -> None:
    kinds = ["plain", "right 12", "plain placed"]
    assert min(assert_compiled_equals_one_process(gloo(2), "model", kinds, layers=1)) >= len(kinds)


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
