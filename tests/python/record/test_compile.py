"""Compiled calls: one graph, the right values at every length, and shapes that are known before the call runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import ulysses_attention as ua
from cells import UNEVEN, with_nan_behind
from oracle import Numbers, oracle_with_grads
from probes import Tensors, assert_equal, each_strategy, normal, plain
from ulysses_attention.launch import ProcessRanks

pytestmark = pytest.mark.slow

Gloo = Callable[[int], ProcessRanks]
CPU_KERNELS = ["auto", "cpu_fused", "math"]  # by name what runs on every processor; "auto" is ours where it can run
NAMES = ("out", "dq", "dk", "dv")


def _whole(seq_len: int) -> Tensors:
    """q, k, v and the weights of the loss of two sequences with grouped heads."""
    return normal(seq_len, 6, 3, batch=2, head_dim=16)


def _shards(layout: ua.SequenceLayout, rank: int) -> list[torch.Tensor]:
    """This rank's q, k and v, which ask for gradients, and its weights; NaN in the rows of q, k and v behind tokens."""
    shards = (with_nan_behind(layout.shard(x, rank), layout.lengths[rank]) for x in _whole(layout.seq_len))
    q, k, v, weights = (x.detach().clone() for x in shards)
    return [*(x.requires_grad_() for x in (q, k, v)), weights.nan_to_num(nan=0.0)]


def _numbers(call: Callable[..., torch.Tensor], shards: Sequence[torch.Tensor], real: int) -> Tensors:
    """What the call gives for a rank's tokens: out, dq, dk and dv."""
    out = call(*shards[:3])
    return tuple(x.detach()[:, :real] for x in (out, *torch.autograd.grad((out * shards[3]).sum(), shards[:3])))


def _joined(ranks: Sequence[Tensors]) -> Numbers:
    return {name: torch.cat(parts, 1) for name, parts in zip(NAMES, zip(*ranks, strict=True), strict=True)}


# --- one graph --------------------------------------------------------------------------------------------------------


def _two_calls(rank: int, group: Any, strategy: str) -> tuple[Tensors, int]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = ua.ulysses_attention(q, k, v, group, strategy=strategy)
        return ua.ulysses_attention(q, k, v, group, strategy=strategy)

    compiled = torch.compile(twice, fullgraph=True, backend=counter)
    layout = ua.SequenceLayout(8, group.size(), UNEVEN)
    for _ in range(2):  # the second time without another compilation
        numbers = _numbers(compiled, _shards(layout, rank), 4)
    return numbers, counter.frame_count


@each_strategy
def test_b101_attention_breaks_no_graph(gloo: Gloo, strategy: str) -> None:
    """An autograd function that takes a process group broke the graph at each attention, forward and backward.

    Source: https://github.com/nvidia-cosmos/cosmos-rl/issues/16
    """
    results = gloo(2).run(_two_calls, strategy)
    assert [graphs for _, graphs in results] == [1, 1]
    *leaves, weights = (x.double() for x in _whole(8))
    q, k, v = (x.requires_grad_() for x in leaves)
    out = plain(plain(q, k, v)[0], k, v)[0]
    grads = torch.autograd.grad(out, (q, k, v), weights)
    assert_equal(_joined([numbers for numbers, _ in results]), dict(zip(NAMES, (out.detach(), *grads), strict=True)))


# --- lengths that change ----------------------------------------------------------------------------------------------


#: How a length that the ranks do not divide is met: shards that differ, rows up to the next multiple, or up to 16.
POLICIES = {
    "uneven": UNEVEN,
    "padded": ua.UlyssesContextParallelPolicy(pad_multiple=1),
    "padded to 16": ua.UlyssesContextParallelPolicy(pad_multiple=8),
}


def _of_lengths(rank: int, group: Any, lengths: Sequence[int], shards: str, options: dict[str, Any]) -> Any:
    """The numbers of one compiled call at each length, and how often it had been compiled after each."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: ua.SequenceLayout) -> torch.Tensor:
        return ua.ulysses_attention(q, k, v, group, layout=layout, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    numbers, graphs = [], []
    with fresh_cache():  # so that what an earlier call compiled does not hide a failure
        for seq_len in lengths:
            layout = ua.SequenceLayout(seq_len, group.size(), POLICIES[shards])
            at_length = functools.partial(compiled, layout=layout)
            numbers.append(_numbers(at_length, _shards(layout, rank), layout.lengths[rank]))
            graphs.append(counter.frame_count)
    return numbers, graphs


@pytest.mark.parametrize(
    ("shards", "lengths", "more"),
    [
        ("uneven", [9, 11, 8], 1),
        ("padded", [9, 11, 8], 1),
        ("padded to 16", [9, 11, 8, 13, 14], 2),  # the last rank has 1, 3 and 0 tokens: torch compiles 0 and 1 apart
    ],
)
@each_strategy
def test_b103_lengths_that_do_not_divide_need_few_compilations(
    gloo: Gloo, strategy: str, shards: str, lengths: list[int], more: int
) -> None:
    """Split sizes that differ between ranks crashed the compiler as soon as shapes were dynamic.

    Source: https://github.com/pytorch/pytorch/issues/155205
    """
    results = gloo(2).run(_of_lengths, lengths, shards, {"strategy": strategy})
    for _, graphs in results:
        assert graphs[-1] - graphs[0] <= more, graphs
    for index, seq_len in enumerate(lengths):
        assert_equal(_joined([numbers[index] for numbers, _ in results]), oracle_with_grads(*_whole(seq_len)))


# --- what is known before the call ------------------------------------------------------------------------------------


def _metadata(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.stride(), x.device


def _metadata_of_a_call(rank: int, group: Any, kernel: str, strategy: str, dtype: torch.dtype, fake: bool) -> Any:
    """Shape, dtype, strides and device of out, lse, dq, dk and dv; fake: as tracing sees them, where nothing runs."""
    layout = ua.SequenceLayout(9, group.size(), UNEVEN)
    inputs = [x.detach().to(dtype) for x in _shards(layout, rank)]
    with FakeTensorMode() if fake else torch.enable_grad() as mode:
        q, k, v, weights = (mode.from_tensor(x) for x in inputs) if fake else inputs
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options = {"layout": layout, "strategy": strategy, "kernel": kernel, "return_lse": True}
        out, lse = ua.ulysses_attention(*leaves, group, **options)
        assert isinstance(out, torch._subclasses.FakeTensor) == fake
        grads = torch.autograd.grad((out * weights).sum(), leaves)
    return [_metadata(x) for x in (out, lse, *grads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
@each_strategy
def test_b104_tracing_sees_what_the_kernel_gives(strategy: str, kernel: str, dtype: torch.dtype) -> None:
    """While tracing, lse had another number of dimensions than from some kernels, and the backward did not fit.

    Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3419
    """
    for world in (1, 2, 3):
        real, fake = (
            ua.run_ranks(
                lambda rank, group, fake=fake: _metadata_of_a_call(rank, group, kernel, strategy, dtype, fake), world
            )
            for fake in (False, True)
        )
        assert real == fake
        assert [len(shape) for shape, *_ in real[0]] == [4, 3, 4, 4, 4]


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@each_strategy
def test_b104_every_kernel_is_right_compiled(gloo: Gloo, strategy: str, kernel: str) -> None:
    results = gloo(2).run(_of_lengths, [9], "uneven", {"strategy": strategy, "kernel": kernel})
    assert_equal(_joined([numbers[0] for numbers, _ in results]), oracle_with_grads(*_whole(9)))


def _op_check(rank: int, group: Any, kernel: str, strategy: str, return_lse: bool) -> dict[str, str]:
    layout = ua.SequenceLayout(9, group.size(), UNEVEN)
    config = f"strategy={strategy}\n" + (f"kernel={kernel}\n" if kernel != "auto" else "")
    arguments = (group.group_name, group.size(), rank, *[list(layout.lengths)] * 4, True, None, return_lse, config)
    return opcheck(torch.ops.ulysses.attention.default, (*_shards(layout, rank)[:3], None, None, *arguments))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kernel", CPU_KERNELS)
@each_strategy
def test_b104_every_kernel_passes_opcheck(gloo: Gloo, strategy: str, kernel: str, return_lse: bool) -> None:
    for result in gloo(2).run(_op_check, kernel, strategy, return_lse):
        assert len(result) == 4 and set(result.values()) == {"SUCCESS"}, result
