"""Bad masks, joint tokens, replicated keys, sinks and softcaps: the id on every rank before any data moves, and the
printed fix applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from refusals import arguments, assert_accepted, assert_fixes_work, assert_refused, change, outcomes, repairs
from ulysses_attention import (
    _C,
    JointTokens,
    MaskLayout,
    SequenceLayout,
    UlyssesAttentionProcessor,
    UlyssesContextParallelPolicy,
    register_backend,
    run_ranks,
    ulysses_attention,
    unregister_backend,
)

WORLD = 2
STRATEGIES = ("ulysses", "allgather_kv")
Options = dict[str, Any]
PADDED = SequenceLayout(11, 2)  # 8 rows a rank, of which 8 and 3 are real
AMBIGUOUS = SequenceLayout(8, 2)  # 8 rows a rank, and 8 real rows in all


def _seen(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


def _text(tokens: int = 3, heads: int = 4, kv_heads: int = 4, **options: Any) -> JointTokens:
    q, k, v = (torch.randn(1, tokens, h, 8) for h in (heads, kv_heads, kv_heads))
    return JointTokens(q, k, v, **options)


class Case:
    """A refused call of 8 rows and 4 heads on each of 2 ranks.

    by_hand: options that a fix in words asks for. fixes: how many of the printed ones a program can apply.
    """

    def __init__(self, error_id: str, *values: str, by_hand: Options | None = None, fixes: int = 0, **options: Any):
        self.error_id, self.values, self.options = error_id, values, options
        self.by_hand, self.fixes = by_hand, fixes

    def __str__(self) -> str:
        return f"{self.error_id}: {self.values[0]}"


REFUSALS = [
    Case("CP022", "attn_mask.device=meta", attn_mask=_seen(1, 16).to("meta"), by_hand={"attn_mask": _seen(1, 16)}),
    Case("CP027", "attn_mask has shape [16]", "2-D or 4-D", attn_mask=_seen(16), by_hand={"attn_mask": _seen(1, 16)}),
    Case("CP027", "attn_mask has shape [1, 16, 16]", "attn_mask.unsqueeze(1)", attn_mask=_seen(1, 16, 16),
         by_hand={"attn_mask": _seen(1, 1, 16, 16)}),
    Case("CP027", "attn_mask has shape [16, 16, 1, 1, 1]", attn_mask=_seen(16, 16, 1, 1, 1),
         by_hand={"attn_mask": _seen(1, 4, 16, 16)}),
    Case("CP027", "attn_mask has shape [5, 16] for B=1", "attn_mask[None, None]", attn_mask=_seen(5, 16),
         by_hand={"attn_mask": _seen(1, 16)}),
    Case("CP027", "attn_mask has shape [1, 2, 16, 16] for B=1 and H=4", "the mask of all heads",
         attn_mask=_seen(1, 2, 16, 16), by_hand={"attn_mask": _seen(1, 4, 16, 16)}),
    Case("CP027", "attn_mask has shape [3, 1, 1, 16] for B=1 and H=4", attn_mask=_seen(3, 1, 1, 16),
         by_hand={"attn_mask": _seen(1, 1, 1, 16)}),
    Case("CP027", "attn_mask has S_kv=9", "S_kv=8 (local), or 16 (global)", attn_mask=_seen(1, 9),
         by_hand={"attn_mask": _seen(1, 8)}),
    Case("CP027", "attn_mask has S_q=9", "S_q=1 (broadcast), or 8 (local), or 16 (global)",
         attn_mask=_seen(1, 1, 9, 16), by_hand={"attn_mask": _seen(1, 1, 8, 16)}),
    Case("CP027", "attn_mask has S_kv=16", "S_kv=8 (local), or 11 (global)", layout=PADDED, attn_mask=_seen(1, 16),
         by_hand={"attn_mask": _seen(1, 11)}),
    Case("CP027", "attn_mask has S_kv=16", "the joined sequence of 19 tokens", joint=_text(), attn_mask=_seen(1, 16),
         by_hand={"attn_mask": _seen(1, 19)}),
    Case("CP027", "attn_mask has S_kv=16", "S_kv=8 (global)", kv_role="replicated", attn_mask=_seen(1, 16),
         by_hand={"attn_mask": _seen(1, 8)}),
    Case("CP027", "attn_mask.dtype=int64", "attn_mask.bool()", attn_mask=_seen(1, 16).long(),
         by_hand={"attn_mask": _seen(1, 16)}),
    Case("CP027", "attn_mask.dtype=complex64", attn_mask=_seen(1, 16).to(torch.complex64),
         by_hand={"attn_mask": _seen(1, 16)}),
    Case("CP027", "attn_mask is a list, not a tensor", attn_mask=[[True] * 16], fixes=1),
    Case("CP027", "attn_mask is a bool, not a tensor", attn_mask=True, fixes=1),
    Case("CP028", "attn_mask has S_kv=8, which is both global and local", layout=AMBIGUOUS, attn_mask=_seen(1, 8),
         fixes=2),
    Case("CP028", "attn_mask has S_q=8, which is both global and local", layout=AMBIGUOUS,
         attn_mask=_seen(1, 1, 8, 8), mask_layout=MaskLayout(kv="global"), fixes=2),
    Case("CP028", "attn_mask has S_q=8 and S_kv=8, both local", "S_kv=16 (global)", attn_mask=_seen(1, 1, 8, 8),
         by_hand={"attn_mask": _seen(1, 1, 8, 16)}),
    Case("CP028", 'mask_layout has kv="global", which is 16 rows, and attn_mask has S_kv=8', attn_mask=_seen(1, 8),
         mask_layout=MaskLayout(kv="global"), fixes=1),
    Case("CP028", 'mask_layout has q="local", which is 8 rows, and attn_mask has S_q=16', attn_mask=_seen(1, 4, 16, 16),
         mask_layout=MaskLayout(q="local", kv="global"), fixes=1),
    Case("CP028", 'mask_layout has kv="local", which is no axis of this call', joint=_text(), attn_mask=_seen(1, 19),
         mask_layout=MaskLayout(kv="local"), fixes=1),
    Case("CP028", "mask_layout is given and attn_mask is not", mask_layout=MaskLayout(kv="global"), fixes=1),
    Case("CP028", "nobody knows the global length", "layout=SequenceLayout", attn_mask=_seen(1, 16),
         require_seq_divisible=False, by_hand={"layout": SequenceLayout.from_lengths([8, 8])}),
    Case("CP028", "nobody knows the global length", attn_mask=_seen(1, 8), mask_layout=MaskLayout(kv="local"),
         require_seq_divisible=False, by_hand={"layout": SequenceLayout.from_lengths([8, 8])}),
    Case("CP029", "joint.q has shape [1, 3, 2, 8], not [1, 3, 4, 8], for q of shape [1, 8, 4, 8]",
         joint=_text(heads=2), by_hand={"joint": _text()}),
    Case("CP029", "joint.k has shape [1, 3, 2, 8], not [1, 3, 4, 8]", joint=_text(kv_heads=2),
         by_hand={"joint": _text()}),
    Case("CP029", "joint.q is torch.float64", joint=JointTokens(*torch.randn(3, 1, 3, 4, 8).double()),
         by_hand={"joint": _text()}),
    Case("CP029", "joint.v has 3 dimensions", joint=JointTokens(*torch.randn(2, 1, 3, 4, 8), torch.randn(3, 4, 8)),
         by_hand={"joint": _text()}),
    Case("CP029", "joint.valid_lens=[4] for B=1 sequences of T=3", joint=_text(valid_lens=[4]),
         by_hand={"joint": _text(valid_lens=[3])}),
    Case("CP029", "joint.valid_lens=[1, 2] for B=1", joint=_text(valid_lens=[1, 2]),
         by_hand={"joint": _text(valid_lens=[0])}),
    Case("CP029", "joint.valid_lens=[] for B=1", joint=_text(valid_lens=[]), by_hand={"joint": _text()}),
    Case("CP033", 'joint.position="behind" is unknown', joint=_text(position="behind"), by_hand={"joint": _text()}),
    Case("CP033", 'mask_layout.kv="everything" is unknown', attn_mask=_seen(1, 16),
         mask_layout=MaskLayout(kv="everything"),  # type: ignore[arg-type]
         by_hand={"mask_layout": MaskLayout(kv="global")}),
    Case("CP034", "sinks has shape [2]", "one logit per query head", sinks=torch.zeros(2),
         by_hand={"sinks": torch.zeros(4)}),
    Case("CP034", "sinks has shape [4], dtype=int64", sinks=torch.zeros(4, dtype=torch.int64),
         by_hand={"sinks": torch.zeros(4)}),
    Case("CP034", "sinks has shape [4], dtype=float32, device=meta", sinks=torch.zeros(4, device="meta"),
         by_hand={"sinks": torch.zeros(4)}),
    Case("CP034", "sinks is a list, not a tensor", sinks=[0.0] * 4, fixes=1),
    Case("CP034", "softcap=0", softcap=0.0, fixes=2),
    Case("CP034", "softcap=-1", softcap=-1.0, fixes=2),
    Case("CP034", "softcap=nan", softcap=float("nan"), fixes=2),
    Case("CP040", "one of its axes is local", attn_mask=torch.zeros(1, 8).requires_grad_(),
         by_hand={"attn_mask": torch.zeros(1, 16).requires_grad_()}),
    Case("CP040", "one of its axes is local", attn_mask=torch.zeros(1, 4, 8, 16).requires_grad_(),
         by_hand={"attn_mask": torch.zeros(1, 4, 8, 16)}),
    Case("CP043", 'joint= with kv_role="replicated"', joint=_text(), kv_role="replicated", fixes=1),
    Case("CP044", 'kv_layout with kv_role="replicated"', kv_role="replicated",
         kv_layout=SequenceLayout.from_lengths([8, 8]), fixes=2),
]  # fmt: skip
UNSUPPORTED = ("CP040", "CP043", "CP044")


def _exception(error_id: str) -> type[Exception]:
    return NotImplementedError if error_id in UNSUPPORTED else ValueError


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_refused_on_every_rank_and_each_printed_fix_works(case: Case, strategy: str) -> None:
    def call(rank: int) -> Options:
        return arguments(strategy=strategy, **case.options)

    text = assert_refused(outcomes(WORLD, call), _exception(case.error_id), case.error_id, *case.values)
    if case.by_hand is None:
        assert case.fixes > 0
        assert_fixes_work(WORLD, call, text, case.error_id, at_least=case.fixes)
    else:
        assert repairs(text, case.error_id) == []  # words, which the line below follows
        assert_accepted(outcomes(WORLD, lambda rank: change(call(rank), **case.by_hand)))


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("case", REFUSALS, ids=str)
def test_a_refusal_of_one_rank_reaches_the_others_before_any_data_moves(case: Case) -> None:
    """Rank 1 alone makes the bad call; nothing but the comparison passes between the ranks."""
    recorders = [_C.Recorder() for _ in range(WORLD)]

    def on_rank(rank: int, group: Any) -> Any:
        policy_and_layout = {name: x for name, x in case.options.items() if name in ("layout", "require_seq_divisible")}
        call = arguments(**(case.options if rank == 1 else policy_and_layout))
        try:
            return ulysses_attention(cp_group=_C.record_group(group, recorders[rank]), **call)
        except Exception as error:
            return error

    results = run_ranks(on_rank, WORLD, timeout_s=10.0)
    assert_refused(results, _exception(case.error_id), case.error_id)
    assert "rank 1" in str(results[0])
    for recorder in recorders:
        assert {record.name for record in recorder.records()} <= {"all_gather"}


# --- what ranks must agree on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_rank", "field"),
    [
        (lambda rank: {"attn_mask": _seen(1, 16)} if rank else {}, "attn_mask.dtype"),
        (lambda rank: {"attn_mask": _seen(1, (16, 8)[rank])}, "attn_mask.axes"),
        (lambda rank: {"attn_mask": _seen(1, 1, (1, 8)[rank], 16)}, "attn_mask.axes"),
        (lambda rank: {"attn_mask": _seen(1, (1, 4)[rank], 1, 16)}, "attn_mask.num_heads"),
        (lambda rank: {"attn_mask": _seen(1, 16).to((torch.bool, torch.float32)[rank])}, "attn_mask.dtype"),
        (lambda rank: {"attn_mask": torch.zeros(1, 16).requires_grad_(rank == 1)}, "requires_grad"),
        (lambda rank: {"sinks": torch.zeros(4)} if rank else {}, "sinks"),
        (lambda rank: {"sinks": torch.zeros(4).requires_grad_(rank == 1)}, "requires_grad"),
        (lambda rank: {"softcap": (5.0, 6.0)[rank]}, "softcap"),
        (lambda rank: {"softcap": 5.0} if rank else {}, "softcap"),
        (lambda rank: {"joint": _text((3, 4)[rank])}, "joint_len"),
        (lambda rank: {"joint": _text(position=("prefix", "suffix")[rank])}, "joint.position"),
        (lambda rank: {"joint": _text(valid_lens=[(2, 3)[rank]])}, "joint_len"),  # cut: the same end in all sequences
        (lambda rank: {"joint": _text()} if rank else {}, "joint_len"),
        (lambda rank: {"qkv_format": ("bshd", "bhsd")[rank], "q": torch.randn(1, 4, 4, 8), "k": torch.randn(1, 4, 4, 8),
                       "v": torch.randn(1, 4, 4, 8)}, "qkv_format"),
        (lambda rank: {"kv_role": "replicated", **dict.fromkeys("kv", torch.randn(1, (5, 6)[rank], 4, 8))}, "kv_role"),
        (lambda rank: {"kv_role": ("replicated", "sharded")[rank]}, "kv_role"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cp060_names_what_differs_between_ranks(strategy: str, of_rank: Callable[[int], Options], field: str) -> None:
    def call(rank: int) -> Options:
        return arguments(strategy=strategy, **of_rank(rank))

    assert_refused(outcomes(WORLD, call), RuntimeError, "CP060", f"ranks disagree on {field}: rank 0 has ")


# --- what a backend must declare --------------------------------------------------------------------------------------


class _Silent(UlyssesAttentionProcessor):
    """Declares nothing."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        return torch.zeros_like(q)


class _Gathers(_Silent):
    """Moves K and V itself."""

    supports = frozenset({"attn_mask"})

    def exchange(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, group: Any) -> Any:
        raise AssertionError("a refused call came as far as the exchange")


@pytest.fixture(autouse=True, scope="module")
def _backends() -> Any:
    register_backend("silent", _Silent)
    register_backend("gathers", _Gathers)
    yield
    unregister_backend("silent")
    unregister_backend("gathers")


@pytest.mark.parametrize(
    ("field", "options", "fixed"),
    [
        ("attn_mask", {"attn_mask": _seen(1, 16)}, {"attn_mask": None}),
        ("attn_mask", {"q": torch.randn(2, 8, 4, 8), "k": torch.randn(2, 8, 4, 8), "v": torch.randn(2, 8, 4, 8),
                       "joint": JointTokens(*torch.randn(3, 2, 3, 4, 8), valid_lens=[1, 2])}, {"joint": None}),
        ("sinks", {"sinks": torch.zeros(4)}, {"sinks": None}),
        ("softcap", {"softcap": 5.0}, {"softcap": None}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cp050_a_field_that_the_backend_does_not_declare(
    strategy: str, field: str, options: Options, fixed: Options
) -> None:
    def call(rank: int) -> Options:
        return arguments(backend_name="silent", strategy=strategy, **options)

    text = assert_refused(outcomes(WORLD, call), NotImplementedError, "CP050", f"this backend does not declare {field}")
    assert "valid_lens=None" in text or f"{field}=None" in text
    assert_accepted(outcomes(WORLD, lambda rank: change(call(rank), **fixed)))


def test_cp050_valid_lens_that_are_cut_need_no_mask_of_the_backend() -> None:
    joint = _text(valid_lens=[2])
    results = outcomes(WORLD, lambda rank: arguments(backend_name="silent", joint=joint))
    assert all(not isinstance(result, Exception) and len(result) == 2 for result in results), results


@pytest.mark.parametrize("options", [{"joint": _text()}, {"kv_role": "replicated"}], ids=["joint", "replicated"])
def test_cp050_a_backend_that_moves_tokens_itself_gets_none_that_every_rank_holds(options: Options) -> None:
    def call(rank: int) -> Options:
        return arguments(backend_name="gathers", **options)

    assert_refused(outcomes(WORLD, call), NotImplementedError, "CP050", 'joint=None and kv_role="sharded"')


def test_the_uneven_policy_takes_a_mask_that_asks_for_no_length() -> None:
    """One row for all queries and replicated keys: nothing is left that a layout would have to say."""
    policy = UlyssesContextParallelPolicy(require_seq_divisible=False)
    keys = dict.fromkeys("kv", torch.randn(1, 5, 4, 8))
    assert_accepted(
        outcomes(
            WORLD,
            lambda rank: arguments(
                rows=(5, 3)[rank], policy=policy, kv_role="replicated", attn_mask=_seen(1, 5), **keys
            ),
        )
    )
