"""Output, lse and gradients on thread ranks against float64 attention: the full product of shapes, then the options."""

from __future__ import annotations

import itertools

import pytest
import torch

import ulysses_attention as ua
from cells import HEADS, STORAGES, STRATEGIES, Cell, assert_right, inputs, run_cells

LENGTHS = [1, 3, 7, 32, 64]
WORLDS = [1, 2, 3, 4, 7]

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def check(world: int, cells: list[Cell]) -> None:
    assert_right(cells, ua.run_ranks(lambda rank, group: run_cells(rank, group, cells), world))


@pytest.mark.parametrize("world", WORLDS)
@each_strategy
def test_every_length_head_count_and_batch(world: int, strategy: str) -> None:
    cells = []
    for a, b, is_causal, batch in itertools.product(range(len(LENGTHS)), range(len(HEADS)), (False, True), (1, 2)):
        layout = "padded" if (a + b + is_causal + batch) % 2 else "uneven"
        cells.append(Cell(LENGTHS[a], HEADS[b], strategy, is_causal, batch, layout))
    assert len(cells) == len(LENGTHS) * len(HEADS) * 2 * 2
    check(world, cells)


@each_strategy
def test_heads_and_tokens_of_equal_number_are_not_swapped(strategy: str) -> None:
    """S_local = H = 8 on 4 ranks, where no shape shows that heads and tokens changed places."""
    cell = Cell(32, (8, 8), strategy)
    world = 4

    def attend_to_constants(rank: int, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        q = torch.zeros(1, 8, 8, 8)  # every key has the same weight, so out is the mean of v over the tokens
        v = torch.arange(8.0).view(1, 1, 8, 1).expand(1, 8, 8, 8) * 100 + rank
        out = ua.ulysses_attention(q, q, v, group, strategy=strategy)
        assert isinstance(out, torch.Tensor)
        return out

    of_head = torch.arange(8.0).view(1, 1, 8, 1).expand(1, 8, 8, 8) * 100 + 1.5
    for out in ua.run_ranks(attend_to_constants, world):
        assert (out - of_head).abs().max() < 1e-3
    q = inputs(cell)[0]
    assert not torch.allclose(q[:, :8], q[:, :8].transpose(1, 2)), "random values tell heads and tokens apart"
    check(world, [cell, Cell(32, (8, 8), strategy, is_causal=True)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@each_strategy
def test_dtypes(dtype: torch.dtype, strategy: str) -> None:
    sample = [(1, (3, 3), False, 2), (7, (8, 1), True, 1), (32, (12, 3), False, 1), (64, (8, 8), True, 2)]
    sample.append((33, (30, 30), True, 1))
    for world in (2, 3):
        cells = [
            Cell(s, heads, strategy, is_causal, batch, layout, dtype, head_dim=16)
            for (s, heads, is_causal, batch), layout in zip(sample, itertools.cycle(("padded", "uneven")))
        ]
        check(world, cells)


@each_strategy
def test_value_heads_of_another_size(strategy: str) -> None:
    sizes = [(8, 4), (4, 8), (8, 1), (1, 3)]
    cells = [
        Cell(13, heads, strategy, is_causal, 2, layout, dtype, head_dim=d, v_head_dim=d_v)
        for (d, d_v), (heads, layout, is_causal), dtype in itertools.product(
            sizes, (((12, 3), "padded", False), ((5, 1), "uneven", True)), (torch.float32, torch.float64)
        )
    ]
    check(3, cells)


@pytest.mark.parametrize("storage", list(STORAGES))
@each_strategy
def test_inputs_in_any_storage(storage: str, strategy: str) -> None:
    cells = [
        Cell(s, heads, strategy, is_causal, 2, layout, storage=storage)
        for s, heads, is_causal, layout in [
            (16, (8, 8), False, "uneven"),
            (19, (12, 3), True, "padded"),
            (9, (2, 1), True, "uneven"),
        ]
    ]
    for world in (1, 3):
        check(world, cells)


def test_gradient_of_a_sum_is_one_number_expanded() -> None:
    """out.sum().backward() hands backward a gradient with all strides 0."""

    def leaf_grads(rank: int, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        v = torch.ones(1, 4, 3, 8, requires_grad=True)
        q = torch.zeros(1, 4, 3, 8)
        ua.ulysses_attention(q, q, v, group).sum().backward()  # type: ignore[union-attr]
        assert v.grad is not None
        return v.grad

    for grad in ua.run_ranks(leaf_grads, 2):  # every query weighs every key alike, so each value counts once in all
        assert torch.allclose(grad, torch.ones_like(grad), atol=1e-6)


@each_strategy
def test_softmax_scale(strategy: str) -> None:
    cells = [
        Cell(13, (12, 3), strategy, is_causal, softmax_scale=scale, layout=layout)
        for scale, is_causal, layout in [
            (0.05, False, "padded"),
            (1.0, True, "uneven"),
            (-0.3, True, "padded"),
            (-9.0, False, "uneven"),
        ]
    ]
    cells.extend(Cell(13, (3, 3), strategy, is_causal, softmax_scale=0.0) for is_causal in (False, True))
    for world in (1, 2, 4):
        check(world, cells)


@pytest.mark.parametrize("world", WORLDS)
@each_strategy
def test_keys_of_another_length(world: int, strategy: str) -> None:
    cells = [
        Cell(s, heads, strategy, is_causal, 1 + index % 2, ("padded", "uneven")[index % 2], kv_seq_len=s_kv)
        for index, ((s, s_kv), is_causal, heads) in enumerate(
            itertools.product([(5, 17), (17, 5), (16, 32), (1, 9), (9, 1)], (False, True), [(8, 8), (12, 3), (2, 1)])
        )
    ]
    check(world, cells)


@each_strategy
def test_ranks_without_tokens(strategy: str) -> None:
    shards = [
        ((0, 5, 0, 3), None),
        ((8, 0, 0, 0), None),
        ((0, 0, 0, 8), None),
        ((0, 4, 4, 0), (9, 0, 0, 2)),
        ((4, 0, 0, 0), (0, 0, 0, 4)),
    ]
    cells = [
        Cell(
            sum(lengths),
            heads,
            strategy,
            is_causal,
            2,
            lengths=lengths,
            kv_lengths=kv_lengths,
            kv_seq_len=None if kv_lengths is None else sum(kv_lengths),
        )
        for (lengths, kv_lengths), heads, is_causal in itertools.product(
            shards, [(8, 8), (12, 3), (2, 1)], (False, True)
        )
    ]
    check(4, cells)


@each_strategy
def test_more_ranks_than_heads(strategy: str) -> None:
    cells = [
        Cell(s, heads, strategy, is_causal, 2, layout)
        for s, heads, is_causal, layout in itertools.product(
            (3, 24), [(1, 1), (2, 1), (3, 3), (4, 2), (6, 1)], (False, True), ("padded", "uneven")
        )
    ]
    check(7, cells)


@each_strategy
def test_lengths_exchanged_without_a_layout(strategy: str) -> None:
    cells = [
        Cell(s, heads, strategy, is_causal, 2, "exchanged", kv_seq_len=s_kv)
        for (s, s_kv), heads, is_causal in itertools.product(
            [(2, None), (13, None), (13, 6)], [(8, 8), (12, 3)], (False, True)
        )
    ]
    for world in (1, 3, 4):
        check(world, cells)


@each_strategy
def test_the_reference_kernel(strategy: str) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    check(3, [Cell(13, (12, 3), strategy, True, 2, "padded", dtype, kernel="math") for dtype in dtypes])


@each_strategy
@pytest.mark.parametrize("needs_grad", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_of_one_input_alone(strategy: str, needs_grad: tuple[bool, bool, bool]) -> None:
    cell = Cell(13, (12, 3), strategy, True)
    layout, _ = cell.layouts(3)

    def gradient(rank: int, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        *local, weights = [layout.shard(x, rank) for x in inputs(cell)]
        leaves = [x.detach().clone().requires_grad_(needed) for x, needed in zip(local, needs_grad, strict=True)]
        out = ua.ulysses_attention(*leaves, group, layout=layout, strategy=strategy, is_causal=True)
        return torch.autograd.grad(out, leaves[needs_grad.index(True)], weights)[0]

    name = ("dq", "dk", "dv")[needs_grad.index(True)]
    everything = ua.run_ranks(lambda rank, group: run_cells(rank, group, [cell])[0][name], 3)
    for alone, among_all in zip(ua.run_ranks(gradient, 3), everything, strict=True):
        assert torch.equal(alone, among_all)  # whose value the product above compares with float64
