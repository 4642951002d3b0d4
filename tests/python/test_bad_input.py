"""Bad input: one test per error id that the operation raises, on every rank, and the printed fix applied."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from refusals import (
    arguments,
    assert_accepted,
    assert_fixes_work,
    assert_refused,
    assert_text,
    change,
    outcomes,
    printed_fix,
)
from ulysses_attention import (
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


class Refusal(NamedTuple):
    """A refused call: what is wrong with it, the error, and how many of its printed fixes a program can apply."""

    error_id: str
    exception: type[Exception]
    options: dict[str, Any]
    values: tuple[str, ...] = ()
    fixes: int = 1


def _bad(error_id: str, *values: str, fixes: int = 1, **options: Any) -> Refusal:
    return Refusal(error_id, ValueError, options, values, fixes)


def _unsupported(error_id: str, *values: str, fixes: int = 1, **options: Any) -> Refusal:
    return Refusal(error_id, NotImplementedError, options, values, fixes)


STRICT = UlyssesContextParallelPolicy(auto_pad=False)

REFUSALS = [
    _bad("CP010", "seq_len=17", "cp_size=2", "18 (9 per rank)", "auto_pad=True", fixes=2, rows=(9, 8),
         policy=STRICT.replace(pad_multiple=1), layout=SequenceLayout.from_lengths([9, 8])),
    _bad("CP011", "S_local=6", "pad_multiple=8", "16 (8 per rank)", fixes=3, rows=6, policy=STRICT),
    _bad("CP011", "seq_len=12", "cp_size*pad_multiple=2*8=16", "pad to 16 (8 per rank)", fixes=3, rows=6,
         policy=STRICT, layout=SequenceLayout.from_lengths([6, 6])),
    _bad("CP020", "q has 3 dimensions", "[8, 4, 8]", q=lambda x: x[0]),
    _bad("CP020", "v has 3 dimensions", "[8, 4, 8]", v=lambda x: x[0]),
    _bad("CP020", "k has 5 dimensions", "[1, 1, 8, 4, 8]", fixes=0, k=lambda x: x[None]),
    _bad("CP020", "q has 0 dimensions", fixes=0, q=lambda x: None),
    _bad("CP021", "q.dtype=int64", "k.dtype=float32", q=lambda x: x.long()),
    _bad("CP021", "q.dtype=float32", "k.dtype=float64", k=lambda x: x.double()),
    _bad("CP021", "v.dtype=bool", v=lambda x: x > 0),
    _bad("CP021", "v.dtype=complex64", v=lambda x: x.to(torch.complex64)),
    _bad("CP025", "softmax_scale=nan", "0.353", softmax_scale=float("nan")),
    _bad("CP025", "softmax_scale=inf", softmax_scale=float("inf")),
    _bad("CP026", "cp_size=3", "the group has 2 ranks", fixes=2, cp_size=3),
    _bad("CP026", "cp_size=0", "the group has 2 ranks", fixes=2, cp_size=0),
    _bad("CP030", 'strategy="ulyses"', "Known: ulysses, allgather_kv", fixes=2, strategy="ulyses"),
    _bad("CP030", 'strategy="ring"', fixes=2, strategy="ring"),
    _bad("CP030", 'strategy="None"', fixes=2, strategy=None),
    _bad("CP030", 'strategy="ulysses kernel=math"', fixes=2, strategy="ulysses\nkernel=math"),
    _bad("CP031", 'kernel="flash3"', "Known: auto, ", "math", fixes=2, kernel="flash3"),
    _bad("CP031", 'kernel="None"', fixes=2, kernel=None),
    _unsupported("CP032", "cuda_flash", "device=cpu", kernel="cuda_flash"),
    _bad("CP033", 'agreement="sometimes"', "auto, always, off", fixes=3, agreement="sometimes"),
    _bad("CP033", 'agreement="None"', fixes=3, agreement=None),
    _bad("CP033", 'qkv_format="bsdh"', "bshd", fixes=3, qkv_format="bsdh"),
    _bad("CP033", 'kv_role="shared"', "sharded", fixes=2, kv_role="shared"),
    _bad("CP033", 'causal_alignment="middle"', "top_left", fixes=1, causal_alignment="middle"),
    _bad("CP033", 'outer="mesh"', "ring", fixes=1, outer="mesh"),
    _unsupported("CP041", "window", window=(4, 4)),
    _unsupported("CP042", "dropout", dropout_p=0.1),
    _unsupported("CP042", "dropout", dropout_p=float("nan")),
    _unsupported("CP042", "dropout", dropout_seed=7),
    _unsupported("CP045", "packed_sequences", cu_seqlens_q=torch.tensor([0, 8])),
    _unsupported("CP045", "packed_sequences", cu_seqlens_kv=torch.tensor([0, 8])),
    _unsupported("CP047", "hybrid_degree", ulysses_degree=2),
    _unsupported("CP047", "hybrid_degree", outer="allgather_kv"),
    _unsupported("CP048", "bottom_right_causal", is_causal=True, causal_alignment="bottom_right"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: f"{case.error_id}-{'-'.join(case.options)}")
def test_refused_on_every_rank_and_each_printed_fix_works(case: Refusal) -> None:
    def call(rank: int) -> dict[str, Any]:
        options = dict(case.options)
        rows = options.pop("rows", 8)
        return arguments(rows=rows[rank] if isinstance(rows, tuple) else rows, **options)

    text = assert_refused(outcomes(WORLD, call), case.exception, case.error_id, *case.values)
    assert_fixes_work(WORLD, call, text, case.error_id, at_least=case.fixes)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", [case for case in REFUSALS if "CP040" <= case.error_id <= "CP049"],
                         ids=lambda case: f"{case.error_id}-{'-'.join(case.options)}")  # fmt: skip
def test_both_strategies_refuse_what_is_not_there_yet(case: Refusal, strategy: str) -> None:
    results = outcomes(WORLD, lambda rank: arguments(strategy=strategy, **case.options))
    assert_refused(results, NotImplementedError, case.error_id, f'strategy="{strategy}"')


# --- fixes that are words, applied by hand --------------------------------------------------------------------------


def test_cp012_rows_that_are_not_the_layouts() -> None:
    layout = SequenceLayout(12, WORLD, UlyssesContextParallelPolicy(pad_multiple=1))
    results = outcomes(WORLD, lambda rank: arguments(rows=8, layout=layout))
    text = assert_refused(results, ValueError, "CP012", "S_local=8", "padded_lengths[0]=6")
    assert "padded_lengths[1]=6" in text  # every rank's problem reaches every rank
    assert "layout.shard(x, rank=0)" in text
    x = torch.randn(1, 12, 4, 8)
    assert_accepted(
        outcomes(WORLD, lambda rank: arguments(layout=layout, **dict.fromkeys("qkv", layout.shard(x, rank))))
    )


@pytest.mark.parametrize("lengths", [[8, -8], [], [0, 0], [2**62, 2**62]])
def test_cp012_illegal_lengths(lengths: list[int]) -> None:
    with pytest.raises(ValueError) as caught:
        SequenceLayout.from_lengths(lengths)
    assert_text(str(caught.value), "CP012", "lengths=[" + ", ".join(map(str, lengths)) + "]")
    numbers = re.findall(r"lengths like \[([\d, ]*)\]", str(caught.value))[0]
    assert SequenceLayout.from_lengths([int(n) for n in numbers.split(", ")]).seq_len > 0


def test_cp012_shard_and_gather_check_their_tensor() -> None:
    layout = SequenceLayout(12, WORLD)
    with pytest.raises(ValueError) as caught:
        layout.shard(torch.zeros(1, 10, 4, 8), 0)
    assert_text(str(caught.value), "CP012", "10 tokens", "the layout 12", "SequenceLayout(10, 2)")
    assert SequenceLayout(10, 2).shard(torch.zeros(1, 10, 4, 8), 0).shape[1] == 8
    for error in run_ranks(lambda rank, group: _error(layout.gather, torch.zeros(1, 6), group, grad="sum"), WORLD):
        assert_text(str(error), "CP012", "6 rows", "8 for rank")


def test_cp013_unequal_lengths_without_a_layout_lists_all() -> None:
    def call(rank: int) -> dict[str, Any]:
        return arguments(rows=(8, 8, 8, 7)[rank])

    text = assert_refused(outcomes(4, call), RuntimeError, "CP013", "[8, 8, 8, 7]")
    assert "layout=SequenceLayout.from_lengths([8, 8, 8, 7])" in text
    layout = SequenceLayout.from_lengths([8, 8, 8, 7])
    assert_accepted(outcomes(4, lambda rank: change(call(rank), layout=layout)))
    assert_fixes_work(4, call, text, "CP013")


def test_cp014_layout_of_another_group_size() -> None:
    results = outcomes(WORLD, lambda rank: arguments(layout=SequenceLayout(32, 4)))
    text = assert_refused(results, ValueError, "CP014", "layout.cp_size=4", "the group has cp_size=2")
    assert "SequenceLayout(32, cp_size=2)" in text
    assert_accepted(outcomes(WORLD, lambda rank: arguments(rows=16, layout=SequenceLayout(32, cp_size=2))))
    for error in run_ranks(
        lambda rank, group: _error(SequenceLayout(32, 4).gather, torch.zeros(1, 8), group, grad="sum"), WORLD
    ):
        assert_text(str(error), "CP014", "4 ranks", "the group has 2")


def test_cp015_layout_made_for_another_rank() -> None:
    def call(rank: int, shift: int = 1) -> dict[str, Any]:
        return arguments(layout=SequenceLayout(16, WORLD, cp_rank=(rank + shift) % WORLD))

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP015", "layout.cp_rank=1 but the caller is rank 0")
    assert "layout.cp_rank=0 but the caller is rank 1" in text and "with cp_rank=0" in text
    assert_accepted(outcomes(WORLD, lambda rank: call(rank, shift=0)))
    with pytest.raises(ValueError, match=r"cp_rank=2 .* from 0 to 1\. \[CP015\]"):
        SequenceLayout(16, WORLD, cp_rank=2)
    with pytest.raises(ValueError, match=r"rank=2 of cp_size=2.*\[CP015\]"):
        SequenceLayout(16, WORLD).shard(torch.zeros(1, 16), 2)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_cp022_mixed_devices(name: str) -> None:
    def call(rank: int) -> dict[str, Any]:
        return arguments(**{name: lambda x: x.to("meta")})

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP022", f"{name}.device=meta", "cpu")
    assert printed_fix(text, "CP022") == f'{name}.to("cpu").'  # no data to copy from a meta tensor: made anew
    assert_accepted(outcomes(WORLD, lambda rank: change(call(rank), **{name: torch.randn(1, 8, 4, 8)})))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (2, 4), (0, 1), (4, 0)])
def test_cp023_head_counts(heads: int, kv_heads: int) -> None:
    text = assert_refused(
        outcomes(WORLD, lambda rank: arguments(heads=heads, kv_heads=kv_heads)),
        ValueError, "CP023", f"H={heads} query heads", f"H_kv={kv_heads}",
    )  # fmt: skip
    fix = printed_fix(text, "CP023")
    counts = {name: [int(n) for n in re.findall(r"\d+", numbers)]
              for name, numbers in re.findall(r"(H_kv|H) one of ([\d, ]*\d)", fix)}  # fmt: skip
    assert counts
    for legal in counts.get("H_kv", []):
        assert_accepted(outcomes(WORLD, lambda rank, legal=legal: arguments(heads=heads, kv_heads=legal)))
    for legal in counts.get("H", []):
        assert_accepted(outcomes(WORLD, lambda rank, legal=legal: arguments(heads=legal, kv_heads=kv_heads)))


@pytest.mark.parametrize(
    ("name", "shape", "values", "fix"),
    [
        ("k", (2, 8, 4, 8), ("k has B=2", "q has B=1", "dim 0"), "k with B=1"),
        ("k", (1, 8, 4, 6), ("k has D=6", "q has D=8", "dim 3"), "k with D=8"),
        ("v", (2, 8, 4, 8), ("v has B=2", "k has B=1"), "v with B=1"),
        ("v", (1, 7, 4, 8), ("v has S_local=7", "k has S_local=8", "dim 1"), "v with S_local=8"),
        ("v", (1, 8, 2, 8), ("v has H_kv=2", "k has H_kv=4", "dim 2"), "v with H_kv=4"),
        ("v", (1, 8, 4, 0), ("v has D_v=0",), "D_v=1 or more"),
    ],
)
def test_cp024_shapes_that_disagree(name: str, shape: tuple[int, ...], values: tuple[str, ...], fix: str) -> None:
    results = outcomes(WORLD, lambda rank: arguments(**{name: torch.randn(shape)}))
    text = assert_refused(results, ValueError, "CP024", *values)
    assert fix in printed_fix(text, "CP024")
    axis = {"B": 0, "S_local": 1, "H_kv": 2, "D": 3, "D_v": 3}[fix.split("=")[0].split()[-1]]
    fixed = list(shape)
    fixed[axis] = int(re.findall(r"=(\d+)", fix)[0])
    assert_accepted(outcomes(WORLD, lambda rank: arguments(**{name: torch.randn(fixed)})))


def test_cp031_a_function_is_no_kernel_of_another_backend() -> None:
    register_backend("silent", _Silent)
    try:

        def call(rank: int) -> dict[str, Any]:
            return arguments(backend_name="silent", kernel=lambda q, k, v, call: q)

        text = assert_refused(outcomes(WORLD, call), ValueError, "CP031", "function <lambda>")
        assert 'kernel="auto"' in text
        assert_accepted(outcomes(WORLD, lambda rank: change(call(rank), kernel="auto")))
        named = outcomes(WORLD, lambda rank: change(call(rank), kernel="math"))
        text = assert_refused(named, NotImplementedError, "CP050", "kernel=math")
        assert_fixes_work(WORLD, lambda rank: change(call(rank), kernel="math"), text, "CP050", at_least=2)
    finally:
        unregister_backend("silent")


def test_cp032_names_every_reason() -> None:
    results = outcomes(WORLD, lambda rank: arguments(dtype=torch.float64, kernel="cpu_fused", v=lambda x: x[..., :4]))
    text = assert_refused(results, NotImplementedError, "CP032", "cpu_fused", "head_dim=8", "v_head_dim=4")
    assert 'kernel="math"' in text


def test_cp033_gather_takes_two_words() -> None:
    layout = SequenceLayout(16, WORLD)
    for error in run_ranks(lambda rank, group: _error(layout.gather, torch.zeros(1, 8), group, grad="mean"), WORLD):
        assert_text(str(error), "CP033", "'mean'", 'grad="sum"', 'grad="slice"')
    for grad in ("sum", "slice"):
        for whole in run_ranks(lambda rank, group: layout.gather(torch.ones(1, 8), group, grad=grad), WORLD):  # noqa: B023
            assert whole.shape == (1, 16)


def test_cp033_and_cp049_order_of_a_layout() -> None:
    with pytest.raises(ValueError) as unknown:
        SequenceLayout(16, WORLD, order="zigzag")
    assert_text(str(unknown.value), "CP033", "order=zigzag", 'order="contiguous"')
    with pytest.raises(NotImplementedError) as later:
        SequenceLayout(16, WORLD, order="head_tail")
    assert_text(str(later.value), "CP049", "order=head_tail", 'order="contiguous"')
    assert SequenceLayout(16, WORLD, order="contiguous").lengths == (8, 8)


class _Silent(UlyssesAttentionProcessor):
    """Declares nothing."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        return q


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("is_causal", {"is_causal": True}),
        ("softmax_scale", {"softmax_scale": 0.5}),
        ("need_lse", {"return_lse": True}),
        ("q_positions", {"is_causal": True, "strategy": "allgather_kv"}),
    ],
)
def test_cp050_a_field_that_the_backend_does_not_declare(field: str, options: dict[str, Any]) -> None:
    register_backend("silent", _Silent)
    try:

        def call(rank: int) -> dict[str, Any]:
            return arguments(backend_name="silent", **options)

        values = (f"this backend does not declare {field}", "It declares nothing")
        text = assert_refused(outcomes(WORLD, call), NotImplementedError, "CP050", *values)
        fixed = {"is_causal": False, "softmax_scale": None, "return_lse": False}
        assert any(f"{name}={value}" in text for name, value in fixed.items())
        assert_accepted(outcomes(WORLD, lambda rank: change(call(rank), **fixed)))
    finally:
        unregister_backend("silent")


def test_cp062_a_rank_that_raises_is_named() -> None:
    def on_rank(rank: int, group: Any) -> Any:
        if rank == 1:
            raise KeyError("the reason")
        seen.append(_error(ulysses_attention, cp_group=group, **arguments()))
        return None

    seen: list[Any] = []
    with pytest.raises(KeyError, match="the reason"):
        run_ranks(on_rank, WORLD)
    assert isinstance(seen[0], RuntimeError)
    assert_text(str(seen[0]), "CP062", "rank 1", "the reason")


def test_cp063_no_group() -> None:
    with pytest.raises(ValueError, match="init_process_group") as caught:
        ulysses_attention(**arguments())
    assert_text(str(caught.value), "CP063", "cp_group=None")
    with pytest.raises(ValueError, match="no process group") as wrong:
        ulysses_attention(cp_group=3, **arguments())  # type: ignore[arg-type]
    assert_text(str(wrong.value), "CP063", "cp_group=3")
    gone: list[str] = []
    run_ranks(lambda rank, group: gone.append(group.group_name), 1)
    with pytest.raises(ValueError) as dead:
        torch.ops.ulysses.attention(*_qkv(), None, None, gone[0], 1, 0, (), (), (), (), False, None, False, "")
    assert_text(str(dead.value), "CP063", gone[0])


def test_cp064_uneven_without_a_layout_cannot_be_traced() -> None:
    qkv = [x.to("meta") for x in _qkv()]
    config = UlyssesContextParallelPolicy(require_seq_divisible=False).text
    with pytest.raises(ValueError) as caught:
        torch.ops.ulysses.attention(*qkv, None, None, "a group", 4, 0, (), (), (), (), False, None, False, config)
    assert_text(str(caught.value), "CP064", "require_seq_divisible=False", "layout=SequenceLayout(")
    lengths = (8, 7, 7, 7)
    out, _ = torch.ops.ulysses.attention(*qkv, None, None, "a group", 4, 0, *[lengths] * 4, False, None, False, config)
    assert out.shape == (1, 8, 4, 8)


def test_all_violated_rules_are_reported_at_once() -> None:
    options = {"strategy": "ulyses", "cp_size": 5, "softmax_scale": float("nan"), "agreement": "x", "pad_multiple": 0}
    for error in outcomes(WORLD, lambda rank: arguments(heads=4, kv_heads=3, **options)):
        assert isinstance(error, ValueError)
        for error_id in ("CP006", "CP023", "CP025", "CP026", "CP030", "CP033"):
            assert_text(str(error), error_id)


def test_an_argument_that_is_not_in_the_signature_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="is_casual"):
        ulysses_attention(is_casual=True, **arguments())  # type: ignore[call-arg]


def _qkv() -> list[torch.Tensor]:
    return [torch.randn(1, 8, 4, 8) for _ in range(3)]


def _error(function: Callable[..., Any], *values: Any, **options: Any) -> Any:
    try:
        return function(*values, **options)
    except Exception as error:
        return error
