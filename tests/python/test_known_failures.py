"""Failures that users of context parallelism met elsewhere, made again here: each with the right outcome.

The first sentence of a test says what went wrong there.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask

from cells import Cell, assert_right, run_cells
from conftest import REPOSITORY
from oracle import max_error, oracle
from refusals import arguments, assert_accepted, assert_fixes_work, assert_refused, assert_text, outcomes, repairs
from ulysses_attention import (
    SequenceLayout,
    UlyssesContextParallelPolicy,
    check_same,
    run_ranks,
    ulysses_attention,
)
from ulysses_attention._load import version_problem

SECONDS = 60.0  # far above what an answer takes, far below a wait for ever


def _text_of(group: Any, call: dict[str, Any]) -> tuple[str, float]:
    """The text of the error, "" if there was none, and the seconds until it came."""
    start = time.monotonic()
    try:
        ulysses_attention(cp_group=group, **call)
        text = ""
    except (RuntimeError, ValueError) as error:
        text = str(error)
    return text, time.monotonic() - start


# --- ranks that would wait for each other -----------------------------------------------------------------------------


def _mask_on_rank_3(rank: int, group: Any) -> list[tuple[str, float]]:
    """S = 13 padded to 16 on 4 ranks: the last holds the padding, and it alone passes a mask. First use, then later."""
    layout = SequenceLayout(13, 4, UlyssesContextParallelPolicy(pad_multiple=4))
    assert layout.padded_lengths == (4, 4, 4, 4) and layout.lengths == (4, 4, 4, 1)
    call = arguments(rows=4, heads=20, layout=layout)
    mask = {"attn_mask": torch.ones(1, 13, dtype=torch.bool)} if rank == 3 else {}
    first = _text_of(group, call | mask)
    ulysses_attention(cp_group=group, **call)
    return [first, _text_of(group, call | mask | {"agreement": "always"}), _text_of(group, call)]


@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_a_mask_on_the_padded_rank_alone_is_the_same_error_on_all(way: str, gloo: Any) -> None:
    """The rank that had padding entered one collective more than the others, and all waited for ever."""
    ranks = run_ranks(_mask_on_rank_3, 4) if way == "threads" else gloo(4).run(_mask_on_rank_3, timeout_s=60.0)
    for first, later, without in ranks:
        for text, seconds in (first, later):
            assert_text(text, "CP060", "attn_mask.axes: rank 0 has nothing (so have ranks 1, 2), rank 3 has broadcast")
            assert seconds < SECONDS
        assert without[0] == ""


def _idle_between_two_calls(rank: int, group: Any) -> list[float]:
    short = dist.new_group(timeout=datetime.timedelta(seconds=2.0))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 16, 4, 8, generator=generator) for _ in range(3)]
    rows = slice(8 * rank, 8 * rank + 8)
    errors = []
    for idle_s in (0.0, 6.0):
        time.sleep(idle_s)
        out = ulysses_attention(*(x[:, rows] for x in inputs), short)
        errors.append(max_error(out, oracle(*inputs)[0][:, rows]))
    return errors


def test_b76_a_pause_longer_than_the_timeout_of_the_group_is_no_fault(gloo: Any) -> None:
    """Idle ranks sat inside a collective, waiting for the next request, until the watchdog ended them.

    Source: https://github.com/vipshop/cache-dit/pull/761
    """
    for errors in gloo(2).run(_idle_between_two_calls, timeout_s=60.0):
        assert len(errors) == 2 and max(errors) < 1e-5


def _another_plan(rank: int, group: Any, agreement: str) -> tuple[str, float]:
    lengths = [3, 3, 3, 1] if rank == 3 else [3, 3, 2, 2]
    layout = SequenceLayout.from_lengths(lengths)
    return _text_of(group, arguments(rows=lengths[rank], heads=24, layout=layout, agreement=agreement))


@pytest.mark.parametrize("agreement", ["auto", "always"])
@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_a_rank_with_another_plan_is_named_with_both_plans(way: str, agreement: str, gloo: Any) -> None:
    """Some inputs made the ranks derive other exchange plans, and they stopped in different collectives."""
    if way == "threads":
        ranks = run_ranks(lambda rank, group: _another_plan(rank, group, agreement), 4)
    else:
        ranks = gloo(4).run(_another_plan, agreement, timeout_s=60.0)
    for text, seconds in ranks:
        assert_text(text, "CP060", "rank 3 has lengths [3, 3, 3, 1]", "rank 0 has lengths [3, 3, 2, 2]")
        assert seconds < SECONDS


def _gather(rank: int, group: Any, lengths: list[int]) -> torch.Tensor:
    """Token t holds t; every rank brings its own rows only."""
    begin = sum(lengths[:rank])
    local = torch.arange(begin, begin + lengths[rank], dtype=torch.float32).view(1, -1, 1)
    return SequenceLayout.from_lengths(lengths).gather(local, group, grad="slice")


@pytest.mark.parametrize("lengths", [[8, 8, 7, 5], [81, 76, 56, 0]])
def test_shards_of_other_sizes_are_gathered(lengths: list[int], gloo: Any) -> None:
    """Ranks called a gather for equal sizes with other sizes, and hung until the timeout."""
    for gathered in gloo(4).run(_gather, lengths):
        assert torch.equal(gathered.flatten(), torch.arange(float(sum(lengths))))


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
def test_key_heads_that_ranks_do_not_divide_are_right(strategy: str, gloo: Any) -> None:
    """A degree that does not divide the key/value heads was found out as a hang in training."""
    cells = [Cell(seq_len=21, heads=(12, 6), strategy=strategy, is_causal=causal) for causal in (False, True)]
    assert_right(cells, gloo(4).run(run_cells, cells))


# --- what must be equal, and is not -----------------------------------------------------------------------------------


def _draw_noise(rank: int, group: Any) -> list[str]:
    """check_same on noise that every rank draws for itself; on rank 1's own change of it; on the same noise."""
    torch.manual_seed(rank)
    own = torch.randn(1, 4, 8)
    same = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    changed = same + 1e-6 if rank == 1 else same
    texts = []
    for noise in (own, changed, same):
        try:
            check_same({"noise": noise, "text": torch.ones(3)}, group)
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_noise_that_differs_is_named_with_the_rank(way: str, gloo: Any) -> None:
    """Without a common seed every rank drew its own noise: one slice of the picture was clean, the rest static."""
    for own, changed, same in run_ranks(_draw_noise, 3) if way == "threads" else gloo(2).run(_draw_noise):
        assert_text(own, "CP068", "noise has other values on rank", "same seed", "broadcast noise from rank 0")
        assert_text(changed, "CP068", "noise has other values on rank 1; is float32 [1, 4, 8] on rank")
        assert "text" not in own + changed and same == ""


def test_the_check_wants_tensors_and_a_group() -> None:
    with pytest.raises(TypeError, match="check_same"):
        run_ranks(lambda rank, group: check_same({"noise": 3}, group), 2)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"init_process_group.*\[CP063\]"):
        check_same({"noise": torch.ones(1)})


# --- versions and options ---------------------------------------------------------------------------------------------


def test_another_torch_is_named_with_what_fits_and_nothing_else_is_needed() -> None:
    """A keyword that the installed flash-attention did not know ended the call; releases fitted only one another."""
    for built_for, installed in (("2.13.0", "2.12.1+cpu"), ("2.12.1", "2.13.0"), ("2.13.0+cu130", "3.0.0")):
        text = version_problem(built_for, installed)
        assert text is not None
        assert_text(text, "CP070", f"torch {built_for}", f"torch {installed}")
        fits = ".".join(built_for.split(".")[:2])
        assert f"pip install 'torch=={fits}.*'" in text
    assert version_problem("2.13.0", "2.13.1+cu130") is None
    # Any release of flash-attention will do, and none: a call runs where importing one is an error.
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('flash_attn', 'flash_attn_interface', 'xformers')))\n"
        "import torch, ulysses_attention as ua\n"
        "x = torch.ones(1, 2, 2, 8)\n"
        "print(ua.run_ranks(lambda rank, group: bool((ua.ulysses_attention(x, x, x, group) == 1).all()), 2))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, True]"


def test_a_block_mask_is_refused_and_not_given_another_block_size() -> None:
    """Sharding a block mask replaced its block size by a fixed one that the GPU's kernel refused."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    for of_ranks in ({0, 1}, {1}):  # which also holds where one rank alone has it
        results = outcomes(2, lambda rank, some=of_ranks: arguments(attn_mask=mask if rank in some else None))
        assert_refused(results, ValueError, "CP027", "attn_mask is a BlockMask, not a tensor", "attn_mask=None")


@pytest.mark.parametrize("seq_len", [9, 10])
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_shards_are_gathered_and_attended_on_gloo(world: int, seq_len: int, gloo: Any) -> None:
    """Gloo refused an uneven gather that another transport takes, so that no test of it ran on a CPU."""
    lengths = list(SequenceLayout(seq_len, world, UlyssesContextParallelPolicy(require_seq_divisible=False)).lengths)
    assert sum(lengths) == seq_len
    for gathered in gloo(world).run(_gather, lengths):
        assert torch.equal(gathered.flatten(), torch.arange(float(seq_len)))
    cells = [
        Cell(seq_len, (4, 2), strategy=strategy, lengths=tuple(lengths)) for strategy in ("ulysses", "allgather_kv")
    ]
    assert_right(cells, gloo(world).run(run_cells, cells))


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error_id", "given", "accepted"),
    [
        ({"q": lambda x: x[0]}, "CP020", "q has 3 dimensions, sizes [8, 4, 8]", "[B, S_local, H, D]"),
        ({"qkv_format": "bhdd"}, "CP033", 'qkv_format="bhdd" is unknown', "Known: bshd, bhsd, sbhd"),
        ({"k": lambda x: x.long()}, "CP021", "k.dtype=int64", "one floating-point dtype"),
        ({"v": lambda x: x.to("meta")}, "CP022", "v.device=meta", "on one device, cpu or cuda"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_accepted(
    options: dict[str, Any], error_id: str, given: str, accepted: str
) -> None:
    """A bare "not implemented" from deep inside the exchange did not say what was not."""
    assert_refused(outcomes(4, lambda rank: arguments(**options)), ValueError, error_id, given, accepted)


def test_a_length_that_does_not_divide_is_named_before_the_model_runs() -> None:
    """The assertion gave no tensor, size or degree, and came in the hook of a later layer."""
    strict = UlyssesContextParallelPolicy(auto_pad=False)
    with pytest.raises(ValueError) as early:  # where the sequence is sharded
        SequenceLayout(9, 4, policy=strict)
    text = str(early.value)
    assert_text(text, "CP010", "seq_len=9", "cp_size=4", "pad to 32 (8 per rank)")
    for repair in repairs(text, "CP010"):
        assert SequenceLayout(9, 4, policy=strict.replace(**repair)).seq_len == 9
    assert SequenceLayout(32, 4, policy=strict).lengths == (8, 8, 8, 8)

    def call(rank: int) -> dict[str, Any]:  # where 9 tokens were cut without a layout
        return arguments(rows=(3, 2, 2, 2)[rank])

    text = assert_refused(outcomes(4, call), RuntimeError, "CP013", "lengths of q", "[3, 2, 2, 2]", "cp_size 4")
    assert "layout=SequenceLayout.from_lengths([3, 2, 2, 2])" in text
    assert_fixes_work(4, call, text, "CP013")
    fixed = SequenceLayout.from_lengths([3, 2, 2, 2])
    assert_accepted(outcomes(4, lambda rank: call(rank) | {"layout": fixed}))


def test_every_example_is_run_as_it_is_written() -> None:
    """The documented configuration failed on its first batch."""
    examples = {path.name for path in (REPOSITORY / "examples").glob("*.py")}
    text = (REPOSITORY / "tests" / "python" / "test_examples.py").read_text()
    run = re.findall(r'_run(?:_example)?\([^)]*"(\w+\.py)"', text)
    assert examples == set(run) and len(examples) >= 2
