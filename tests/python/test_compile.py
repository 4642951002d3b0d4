"""torch.compile and opcheck over the real collectives of two Gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch.library import opcheck

from ulysses_attention import SequenceLayout, UlyssesContextParallelPolicy, ulysses_attention
from ulysses_attention.launch import ProcessRanks

pytestmark = pytest.mark.slow

HEADS, KV_HEADS, HEAD_DIM = 6, 3, 8
UNEVEN = UlyssesContextParallelPolicy(require_seq_divisible=False)
Gloo = Callable[[int], ProcessRanks]


def shards(layout: SequenceLayout, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layout.seq_len)
    whole = [torch.randn(2, layout.seq_len, h, HEAD_DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)]
    return [layout.shard(x, rank).detach().clone().requires_grad_() for x in whole]


def out_and_grads(fn: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = fn(*inputs)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def compare(rank: int, group: Any, lengths: list[int], options: dict[str, Any], backend: str, with_layout: bool) -> Any:
    """Errors of the compiled call against the eager one for each length, and how often it was compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: SequenceLayout | None) -> torch.Tensor:
        return ulysses_attention(q, k, v, group, group.size(), layout=layout, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    errors, counts = [], []
    with fresh_cache():  # the cache on disk knows nothing of a change in our own shapes
        for length in lengths:
            layout = SequenceLayout(length, group.size(), UNEVEN)
            given = layout if with_layout else None
            eager = out_and_grads(lambda q, k, v, given=given: call(q, k, v, given), shards(layout, rank))
            traced = out_and_grads(lambda q, k, v, given=given: compiled(q, k, v, given), shards(layout, rank))
            errors.append(max((a - b).abs().max().item() for a, b in zip(eager, traced, strict=True)))
            counts.append(counter.frame_count)
    return errors, counts


@pytest.mark.parametrize(
    "options",
    [{}, {"strategy": "allgather_kv", "is_causal": True}, {"softmax_scale": 0.3, "kernel": "math"}],
    ids=["ulysses", "allgather_kv causal", "scale and math"],
)
def test_fullgraph_equals_eager_from_64_to_96_tokens_without_recompiling(gloo: Gloo, options: dict[str, Any]) -> None:
    for errors, counts in gloo(2).run(compare, [64, 72, 80, 96], options, "aot_eager", False):
        assert max(errors) == 0.0
        assert len(set(counts)) == 1, counts


def test_uneven_layouts_compile_once(gloo: Gloo) -> None:
    for errors, counts in gloo(2).run(compare, [9, 11, 8, 13], {}, "aot_eager", True):
        assert max(errors) == 0.0
        assert counts[-1] - counts[0] <= 1, counts


def test_inductor_equals_eager(gloo: Gloo) -> None:
    for errors, _ in gloo(2).run(compare, [64], {}, "inductor", False):
        assert max(errors) <= 1e-6


def refused(rank: int, group: Any) -> str:
    torch._dynamo.reset()
    call = torch.compile(
        lambda q, k, v: ulysses_attention(q, k, v, group, policy=UNEVEN), fullgraph=True, backend="aot_eager"
    )
    try:
        call(*shards(SequenceLayout(8, group.size()), rank))
    except Exception as error:
        return str(error)
    return ""


def test_cp064_lengths_that_only_the_call_would_know_are_refused_while_tracing(gloo: Gloo) -> None:
    for text in gloo(2).run(refused):
        assert "[CP064]" in text
        assert "pass layout=SequenceLayout" in text


def check_ops(rank: int, group: Any) -> list[dict[str, str]]:
    world, lengths = group.size(), list(SequenceLayout(17, group.size(), UNEVEN).lengths)
    none = (None, None)  # attn_mask, sinks
    results = []
    for config in ("", "strategy=allgather_kv\n"):
        for real in ([], lengths):
            rows = real[rank] if real else 8
            q, k, v = (torch.randn(1, rows, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
            for return_lse in (False, True):
                common = (group.group_name, world, rank, real, real, real, real, True, None, return_lse, config)
                grad = tuple(x.clone().requires_grad_() for x in (q, k, v))
                results.append(opcheck(torch.ops.ulysses.attention.default, (*grad, *none, *common)))
                results.append(opcheck(torch.ops.ulysses.attention_forward.default, (q, k, v, *none, *common, 0)))
            common = (group.group_name, world, rank, real, real, real, real, True, None, False, config)
            out, _, *saved = torch.ops.ulysses.attention_forward(q, k, v, *none, *common, 7)
            sizes = [1, rows, HEADS, HEAD_DIM, rows, KV_HEADS, HEAD_DIM]
            arguments = (torch.randn_like(out), None, q, k, v, *none, out, *saved, sizes, *common, 7)
            results.append(opcheck(torch.ops.ulysses.attention_backward.default, arguments))
        results += check_ops_with_everything(rank, group, config)
    x = torch.randn(2, 8, 3, requires_grad=True)
    for grad_mode in ("sum", "slice"):
        arguments = (x, group.group_name, rank, [8] * world, 1, grad_mode)
        results.append(opcheck(torch.ops.ulysses.gather_sequence.default, arguments))
    gathered = torch.randn(2, 8 * world, 3)
    arguments = (gathered, 8, group.group_name, rank, [8] * world, 1, "sum")
    results.append(opcheck(torch.ops.ulysses.gather_sequence_backward.default, arguments))
    results.append(opcheck(torch.ops.ulysses.sum_grad.default, (x, group.group_name)))
    results.append(opcheck(torch.ops.ulysses.sum_over_ranks.default, (gathered, group.group_name)))
    return results


def check_ops_with_everything(rank: int, group: Any, config: str) -> list[dict[str, str]]:
    """A float mask and sinks that ask for gradients, three joint tokens beside five rows, and a gradient of lse."""
    world, rows, joint_len = group.size(), 5, 3
    q, k, v = (torch.randn(1, rows + joint_len, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    extras = (torch.randn(1, 1, 1, joint_len + rows * world), torch.randn(HEADS))
    config += f"joint_len={joint_len}\n"
    common = (group.group_name, world, rank, (), (), (), (), False, None, True, config)
    inputs = tuple(x.clone().requires_grad_() for x in (q, k, v, *extras))
    out, lse, *saved = torch.ops.ulysses.attention_forward(q, k, v, *extras, *common, 31)
    sizes = [1, rows + joint_len, HEADS, HEAD_DIM, rows + joint_len, KV_HEADS, HEAD_DIM]
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, *extras, out, *saved, sizes, *common, 31)
    return [
        opcheck(torch.ops.ulysses.attention.default, (*inputs, *common)),
        opcheck(torch.ops.ulysses.attention_backward.default, arguments),
    ]


def test_every_op_passes_every_opcheck_utility(gloo: Gloo) -> None:
    for results in gloo(2).run(check_ops):
        assert len(results) == 2 * (2 * 5 + 2) + 5
        for result in results:
            assert set(result.values()) == {"SUCCESS"}, result
            assert len(result) == 4


def gathered_shapes(rank: int, group: Any) -> float:
    torch._dynamo.reset()
    layout = SequenceLayout(9, group.size(), UNEVEN)
    whole = torch.arange(2.0 * 9 * 3).reshape(2, 9, 3)
    local = layout.shard(whole, rank).clone()
    call = torch.compile(lambda x: layout.gather(x, group, grad="sum"), fullgraph=True, backend="aot_eager")
    return (call(local) - whole).abs().max().item()


def test_gather_compiles(gloo: Gloo) -> None:
    assert gloo(2).run(gathered_shapes) == [0.0, 0.0]
