"""A mask with a local axis is gathered once for all calls that use it, by its own size and never by [S, S]."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ulysses_attention as ua
from cells import STRATEGIES
from oracle import max_error
from probes import Tensors, normal, plain
from refusals import assert_text
from ulysses_attention import _C

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
PLAIN = {"ulysses": 2, "allgather_kv": 1}  # collectives of a call without a mask, forward; as many backward
ROWS, BATCH, HEADS = 4, 2, 4


class Rank:
    """One rank of 2, its shards, and a group that counts what passes."""

    def __init__(self, rank: int, group: Any, strategy: str) -> None:
        self.rank, self.strategy, self.recorder = rank, strategy, _C.Recorder()
        self.group = _C.record_group(group, self.recorder)
        self.shards = [x[:, ROWS * rank : ROWS * (rank + 1)].clone().requires_grad_() for x in whole()]

    def call(self, mask: torch.Tensor, **options: Any) -> tuple[torch.Tensor, list[int]]:
        """The output, and the bytes that each collective of the forward sent."""
        self.recorder.clear()
        options = {"agreement": "off", "strategy": self.strategy, "attn_mask": mask, **options}
        out = ua.ulysses_attention(*self.shards, self.group, **options)
        return out, [record.bytes_sent for record in self.recorder.records()]  # type: ignore[return-value]

    def count(self, mask: torch.Tensor, **options: Any) -> tuple[int, int]:
        """Collectives of a forward, and of its backward."""
        out, forward = self.call(mask, **options)
        self.recorder.clear()
        torch.autograd.grad(out, self.shards, torch.ones_like(out))
        return len(forward), len(self.recorder.records())


def whole() -> Tensors:
    return normal(2 * ROWS, HEADS, 2, batch=BATCH)[:3]


def on_ranks(strategy: str, fn: Callable[[Rank], Any]) -> list[Any]:
    return ua.run_ranks(lambda rank, group: fn(Rank(rank, group, strategy)), 2, timeout_s=10.0)


def own(rank: int, x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.narrow(dim, ROWS * rank, ROWS).clone()


KEYS = torch.arange(2 * ROWS).view(1, -1) < torch.tensor([[8], [5]])
FULL = torch.rand(1, HEADS, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.7
# What a rank passes, how it is declared, and how many gathers it takes in each strategy.
MASKS: dict[str, tuple[Callable[[int], torch.Tensor], ua.MaskLayout, dict[str, int]]] = {
    "global": (lambda rank: KEYS.clone(), ua.MaskLayout(kv="global"), {"ulysses": 0, "allgather_kv": 0}),
    "keys": (lambda rank: own(rank, KEYS, 1), ua.MaskLayout(kv="local"), {"ulysses": 1, "allgather_kv": 1}),
    "queries": (lambda rank: own(rank, FULL, 2), ua.MaskLayout("local", "global"), {"ulysses": 1, "allgather_kv": 0}),
    "keys of all rows": (lambda rank: own(rank, FULL, 3), ua.MaskLayout("global", "local"),
                         {"ulysses": 1, "allgather_kv": 1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MASKS)
@each_strategy
def test_the_first_call_gathers_and_later_ones_do_not(strategy: str, kind: str) -> None:
    make, layout, gathers = MASKS[kind]
    n, more = PLAIN[strategy], gathers[strategy]

    def on_rank(rank: Rank) -> list[tuple[int, int]]:
        mask = make(rank.rank)
        return [rank.count(mask, mask_layout=layout) for _ in range(3)]

    assert on_ranks(strategy, on_rank) == [[(n + more, n), (n, n), (n, n)]] * 2


@each_strategy
def test_after_an_in_place_write_it_is_gathered_again_and_read_anew(strategy: str) -> None:
    n = PLAIN[strategy]

    def on_rank(rank: Rank) -> list[tuple[torch.Tensor, int]]:
        mask = own(rank.rank, KEYS, 1)
        found = []
        for _ in range(2):
            for _ in range(2):
                out, sent = rank.call(mask, mask_layout=ua.MaskLayout(kv="local"))
                found.append((out.detach(), len(sent)))
            mask[:, 1] = False
        return found

    ranks = on_ranks(strategy, on_rank)
    changed = KEYS.clone()
    changed[:, [1, ROWS + 1]] = False
    for index, (seen, count) in enumerate([(KEYS, n + 1), (KEYS, n), (changed, n + 1), (changed, n)]):
        assert [part[index][1] for part in ranks] == [count] * 2
        out = torch.cat([part[index][0] for part in ranks], 1)
        assert max_error(out, plain(*whole(), seen=seen[:, None, None])[0]) < 1e-5


@each_strategy
def test_another_tensor_is_another_mask(strategy: str) -> None:
    """Equal values are not compared: a copy, and a new view, are gathered for themselves."""
    n = PLAIN[strategy]

    def on_rank(rank: Rank) -> list[int]:
        mask = own(rank.rank, KEYS, 1)
        masks = [mask, mask.clone(), mask[:], mask]
        return [len(rank.call(m, mask_layout=ua.MaskLayout(kv="local"))[1]) for m in masks]

    assert on_ranks(strategy, on_rank) == [[n + 1, n + 1, n + 1, n]] * 2


@each_strategy
def test_another_layout_of_the_same_rows_is_another_gather(strategy: str) -> None:
    """4 rows a rank, of which 4 and 3, or 3 and 4, or all are real: the same tensor stands for other tokens."""
    n = PLAIN[strategy]
    layouts = []
    for lengths in ((4, 4), (4, 3), (3, 4), (4, 3), (4, 4)):
        layout = ua.SequenceLayout.from_lengths(lengths)
        object.__setattr__(layout, "padded_lengths", (4, 4))
        layouts.append(layout)
    mask_of = [torch.tensor([[True, True, False, True]]), torch.tensor([[False, True, True, True]])]

    def on_rank(rank: Rank) -> list[tuple[torch.Tensor, int]]:
        mask, found = mask_of[rank.rank].clone(), []
        for layout in layouts:
            out, sent = rank.call(mask, layout=layout, mask_layout=ua.MaskLayout(kv="local"))
            found.append((out.detach(), len(sent)))
        return found

    ranks = on_ranks(strategy, on_rank)
    assert [[count for _, count in part] for part in ranks] == [[n + 1, n + 1, n + 1, n, n]] * 2
    for index, layout in enumerate(layouts):
        first, second = layout.lengths
        rows = [*range(first), *range(ROWS, ROWS + second)]
        seen = torch.cat(mask_of, 1)[:, rows]
        expected = plain(*(x[:, rows] for x in whole()), seen=seen[:, None, None])[0]
        parts = [part[index][0][:, :real] for part, real in zip(ranks, layout.lengths, strict=True)]
        assert max_error(torch.cat(parts, 1), expected) < 1e-5


@each_strategy
def test_the_last_sixteen_are_kept(strategy: str) -> None:
    n = PLAIN[strategy]

    def on_rank(rank: Rank) -> list[int]:
        masks = [own(rank.rank, KEYS, 1) for _ in range(17)]
        order = [*range(17), *range(16, 0, -1), 0, 1]  # once each; then all but the first are there; it drives one out
        return [len(rank.call(masks[i], mask_layout=ua.MaskLayout(kv="local"))[1]) - n for i in order]

    assert on_ranks(strategy, on_rank) == [[1] * 17 + [0] * 16 + [1, 0]] * 2


@each_strategy
def test_a_backward_whose_mask_is_no_longer_kept_gathers_it(strategy: str) -> None:
    n = PLAIN[strategy]

    def on_rank(rank: Rank) -> tuple[int, list[torch.Tensor]]:
        first, *others = (own(rank.rank, KEYS, 1) for _ in range(17))
        out, _ = rank.call(first, mask_layout=ua.MaskLayout(kv="local"))
        for mask in others:
            rank.call(mask, mask_layout=ua.MaskLayout(kv="local"))
        rank.recorder.clear()
        grads = torch.autograd.grad(out, rank.shards, torch.ones_like(out))
        return len(rank.recorder.records()), list(grads)

    ranks = on_ranks(strategy, on_rank)
    assert [count for count, _ in ranks] == [n + 1] * 2
    leaves = [x.double().requires_grad_() for x in whole()]
    out, _ = plain(*leaves, seen=KEYS[:, None, None])
    for index, wanted in enumerate(torch.autograd.grad(out, leaves, torch.ones_like(out))):
        assert max_error(torch.cat([grads[index] for _, grads in ranks], 1), wanted) < 1e-5


@each_strategy
def test_inference_tensors_have_no_version_and_are_gathered_each_time(strategy: str) -> None:
    n = PLAIN[strategy]

    def on_rank(rank: Rank) -> list[int]:
        with torch.inference_mode():
            mask = own(rank.rank, KEYS, 1)
            return [len(rank.call(mask, mask_layout=ua.MaskLayout(kv="local"))[1]) for _ in range(2)]

    assert on_ranks(strategy, on_rank) == [[n + 1] * 2] * 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float64])
@each_strategy
def test_bytes_of_a_gather_are_those_of_the_own_part(strategy: str, dtype: torch.dtype) -> None:
    """Keys: B · S_local; query rows: S_local · S a head. In the mask's dtype; a bool is a byte."""
    size = torch.empty(0, dtype=dtype).element_size()

    def sent(rank: Rank, mask: torch.Tensor, layout: ua.MaskLayout) -> int:
        mask = mask if dtype == torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        mask = mask.to(dtype)
        first, later = (sum(rank.call(mask, mask_layout=layout)[1]) for _ in range(2))
        return first - later

    def on_rank(rank: Rank) -> tuple[int, int]:
        keys = sent(rank, own(rank.rank, KEYS, 1), ua.MaskLayout(kv="local"))
        return keys, sent(rank, own(rank.rank, FULL, 2), ua.MaskLayout("local", "global"))

    rows = HEADS * ROWS * 2 * ROWS if strategy == "ulysses" else 0
    assert on_ranks(strategy, on_rank) == [(BATCH * ROWS * size, rows * size)] * 2


@pytest.mark.parametrize("kind", ["global", "keys"])
@each_strategy
def test_a_key_mask_reaches_the_kernel_as_keys_and_never_as_s_times_s(strategy: str, kind: str) -> None:
    make, layout, _ = MASKS[kind]
    shapes: list[tuple[tuple[int, ...], int]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        shapes.append((tuple(call.attn_mask.shape), call.attn_mask.untyped_storage().nbytes()))
        return torch.zeros(*q.shape[:3], v.shape[3])

    on_ranks(strategy, lambda rank: rank.call(make(rank.rank), mask_layout=layout, kernel=attend))
    assert set(shapes) == {((BATCH, 1, 1, 2 * ROWS), BATCH * 2 * ROWS)}


@pytest.mark.parametrize("agreement", ["auto", "always"])
@each_strategy
def test_ranks_agree_on_whether_to_gather(strategy: str, agreement: str) -> None:
    """Rank 1 alone writes into its mask: the same error on both, and no rank waits in a gather for the other."""

    def on_rank(rank: int, group: Any) -> tuple[str, torch.Tensor]:
        shards = [x[:, ROWS * rank : ROWS * (rank + 1)] for x in whole()]
        options = {"strategy": strategy, "agreement": agreement, "mask_layout": ua.MaskLayout(kv="local")}
        mask = own(rank, KEYS, 1)
        ua.ulysses_attention(*shards, group, attn_mask=mask, **options)
        if rank == 1:
            mask[:, 0] = True
        try:
            ua.ulysses_attention(*shards, group, attn_mask=mask, **options)
            text = ""
        except RuntimeError as error:
            text = str(error)
        mask = mask.clone()  # new on both, and the group goes on
        return text, ua.ulysses_attention(*shards, group, attn_mask=mask, **options)

    for text, out in ua.run_ranks(on_rank, 2, timeout_s=10.0):
        assert_text(text, "CP060", "attn_mask.is_gathered: rank 0 has True, rank 1 has False")
        assert out.isfinite().all()


def test_each_group_has_its_own_gather() -> None:
    def on_rank(rank: int, group: Any) -> list[int]:
        one, other = Rank(rank, group, "ulysses"), Rank(rank, group, "ulysses")
        mask, layout = own(rank, KEYS, 1), ua.MaskLayout(kv="local")
        return [len(which.call(mask, mask_layout=layout)[1]) for which in itertools.chain([one, other] * 2)]

    assert ua.run_ranks(on_rank, 2, timeout_s=10.0) == [[3, 3, 2, 2]] * 2
