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

from ulysses_attention import (
    JointTokens,
    MaskLayout,
    SequenceLayout,
    UlyssesContextParallelPolicy,
    sum_grad,
    ulysses_attention,
)
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


def extras_of(rank: int, group: Any, kind: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Options that hold tensors, and those of the tensors that ask for a gradient."""
    g = torch.Generator().manual_seed(3)
    layout = SequenceLayout(9, group.size(), UNEVEN)
    text = [torch.randn(2, 5, h, HEAD_DIM, generator=g).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]
    bias = torch.randn(1, HEADS, 9, 9, generator=g).requires_grad_()
    rows = layout.shard(torch.rand(2, HEADS, 9, 9, generator=g) < 0.7, rank, dim=2)
    sinks = torch.randn(HEADS, generator=g).requires_grad_()
    return {
        "mask": ({"attn_mask": bias}, [bias]),
        "sharded mask": ({"attn_mask": rows, "mask_layout": MaskLayout("local", "global")}, []),
        "joint": ({"joint": JointTokens(*text)}, text),
        "joint suffix": ({"joint": JointTokens(*text, position="suffix", valid_lens=(5, 2)), "is_causal": True}, text),
        "sinks": ({"sinks": sinks, "softcap": 4.0}, [sinks]),
        "lse": ({"return_lse": True}, []),
        "bhsd": ({"qkv_format": "bhsd"}, []),
        "replicated": ({"kv_role": "replicated"}, []),
    }[kind]  # type: ignore[return-value]


def flat(result: Any) -> list[torch.Tensor]:
    """Every tensor of a result, pairs of pairs included."""
    return [result] if isinstance(result, torch.Tensor) else [x for part in result for x in flat(part)]


def compare_extras(rank: int, group: Any, kind: str, strategy: str) -> tuple[float, int]:
    """The compiled call against the eager one: the largest difference of outputs and gradients, and compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layout = SequenceLayout(9, group.size(), UNEVEN)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Any:
        return ulysses_attention(q, k, v, group, strategy=strategy, layout=layout, **options)

    found = []
    for fn in (call, torch.compile(call, fullgraph=True, backend=counter)):
        options, leaves = extras_of(rank, group, kind)
        inputs = shards(layout, rank)
        if kind == "bhsd":
            inputs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs]
        if kind == "replicated":  # as many on every rank
            inputs[1:] = [x.detach()[:, :4].clone().requires_grad_() for x in inputs[1:]]
        for _ in range(2):
            outs = flat(fn(*inputs, options))
            grads = torch.autograd.grad(outs, inputs + leaves, [torch.ones_like(x) for x in outs])
        found.append([x.detach() for x in outs] + list(grads))
    pairs = list(zip(*found, strict=True))
    return max((a - b).nan_to_num(nan=0.0).abs().max().item() for a, b in pairs), counter.frame_count


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
@pytest.mark.parametrize(
    "kind", ["mask", "sharded mask", "joint", "joint suffix", "sinks", "lse", "bhsd", "replicated"]
)
def test_masks_text_and_scores_compile_to_one_graph(gloo: Gloo, kind: str, strategy: str) -> None:
    for error, count in gloo(2).run(compare_extras, kind, strategy):
        assert error == 0.0 and count == 1


def summed(rank: int, group: Any) -> torch.Tensor:
    torch._dynamo.reset()
    call = torch.compile(lambda x: sum_grad(x * 2, group) * (rank + 1), fullgraph=True, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    return torch.autograd.grad(call(x).sum(), x)[0]


def test_sum_grad_compiles(gloo: Gloo) -> None:
    for grad in gloo(2).run(summed):
        assert torch.equal(grad, torch.full((3,), 2.0 * (1 + 2)))


Extras = tuple[torch.Tensor | None, torch.Tensor | None]  # attn_mask, sinks


def check_attention_ops(
    group: Any, rank: int, lengths: list[int], extras: Extras, config: str, return_lse: bool
) -> list[dict[str, str]]:
    """attention, attention_forward and attention_backward with everything that the extras ask of them."""
    mask, sinks = extras
    rows = lengths[rank] if lengths else 8
    q, k, v = (torch.randn(1, rows, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    common = (group.group_name, group.size(), rank, *[lengths] * 4, True, None, return_lse, config)
    leaves = [x if x is None else x.clone().requires_grad_(x.is_floating_point()) for x in (q, k, v, mask, sinks)]
    results = [
        opcheck(torch.ops.ulysses.attention.default, (*leaves, *common)),
        opcheck(torch.ops.ulysses.attention_forward.default, (q, k, v, mask, sinks, *common, 0)),
    ]
    bits = 7 + 8 * (mask is not None and mask.is_floating_point()) + 16 * (sinks is not None)
    out, lse, *saved = torch.ops.ulysses.attention_forward(q, k, v, mask, sinks, *common, bits)
    sizes = [1, rows, HEADS, HEAD_DIM, rows, KV_HEADS, HEAD_DIM]
    grad_lse = torch.randn_like(lse) if return_lse else None
    arguments = (torch.randn_like(out), grad_lse, q, k, v, mask, sinks, out, *saved, sizes, *common, bits)
    return [*results, opcheck(torch.ops.ulysses.attention_backward.default, arguments)]


def check_ops(rank: int, group: Any) -> list[dict[str, str]]:
    world, lengths = group.size(), list(SequenceLayout(17, group.size(), UNEVEN).lengths)
    results = []
    for config in ("", "strategy=allgather_kv\n"):
        for real, total in (([], 8 * world), (lengths, 17)):
            for extras in ((None, None), (torch.randn(1, HEADS, total, total), torch.randn(HEADS))):
                for return_lse in (False, True):
                    results += check_attention_ops(group, rank, real, extras, config, return_lse)
    keys = torch.rand(1, 8) < 0.7
    results += check_attention_ops(group, rank, [], (keys, None), "mask_kv=local\nsoftcap=3.0\n", False)
    results += check_attention_ops(group, rank, [], (None, None), "joint_len=3\njoint_position=suffix\n", True)
    results += check_attention_ops(group, rank, [], (None, None), "kv_role=replicated\n", True)
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


def test_every_op_passes_every_opcheck_utility(gloo: Gloo) -> None:
    for results in gloo(2).run(check_ops, timeout_s=600.0):
        assert len(results) == (2 * 2 * 2 * 2 + 3) * 3 + 5
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
