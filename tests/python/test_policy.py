"""The policy as a value, and each of its fields through the real operation."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from oracle import max_error, oracle
from refusals import arguments, assert_accepted, assert_fixes_work, assert_refused, assert_text, outcomes
from ulysses_attention import (
    _C,
    SequenceLayout,
    UlyssesAttentionProcessor,
    UlyssesContextParallelPolicy,
    register_backend,
    run_ranks,
    ulysses_attention,
    unregister_backend,
)

WORLD = 2
CHECKS = ("seq_divisible", "kv_global_gathered", "output_restore_dim")


def test_defaults_are_the_documented_ones() -> None:
    policy = UlyssesContextParallelPolicy()
    shown = {name: default for name, default, _ in _C.policy_fields()}
    assert list(shown) == [field.name for field in dataclasses.fields(policy)]
    for name, default in shown.items():
        assert getattr(policy, name) == eval(default), name
    assert policy.required_checks == CHECKS and policy.pad_multiple == 8


def test_is_a_frozen_value() -> None:
    policy = UlyssesContextParallelPolicy(pad_multiple=4, required_checks=list(CHECKS))  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.pad_multiple = 1  # type: ignore[misc]
    assert policy == UlyssesContextParallelPolicy(pad_multiple=4) != UlyssesContextParallelPolicy()
    assert hash(policy) == hash(UlyssesContextParallelPolicy(pad_multiple=4))
    assert len({policy, UlyssesContextParallelPolicy(pad_multiple=4), UlyssesContextParallelPolicy()}) == 2
    assert eval(repr(policy)) == policy and "pad_multiple=4" in repr(policy)


def test_replace_changes_a_copy() -> None:
    policy = UlyssesContextParallelPolicy()
    changed = policy.replace(pad_multiple=1, auto_pad=False)
    assert (policy.pad_multiple, changed.pad_multiple, changed.auto_pad) == (8, 1, False)
    assert changed.padded_seq_len(3001, 4) == 3004 and policy.padded_seq_len(3001, 4) == 3008
    with pytest.raises(TypeError, match="pad_mutliple"):
        policy.replace(pad_mutliple=1)


# --- each field steers the operation, or is refused by it -----------------------------------------------------------


class _Doubled(UlyssesAttentionProcessor):
    """Twice the attention: visible in the output."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
        return 2 * torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def test_backend_name_selects_the_backend() -> None:
    inputs = [torch.randn(1, 16, 4, 8) for _ in range(3)]
    layout = SequenceLayout(16, WORLD)

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        policy = UlyssesContextParallelPolicy(backend_name="doubled")
        return ulysses_attention(*(layout.shard(x, rank) for x in inputs), group, policy=policy, layout=layout)

    register_backend("doubled", _Doubled)
    try:
        out = torch.cat(run_ranks(on_rank, WORLD), 1)
    finally:
        unregister_backend("doubled")
    assert max_error(out, 2 * oracle(*inputs)[0]) < 1e-5


def test_backend_name_selects_a_backend_that_c_plus_plus_registered() -> None:
    q = torch.randn(1, 8, 4, 8)
    policy = UlyssesContextParallelPolicy(backend_name="doubled")
    instance = _Doubled()
    _C.register_backend("doubled", instance)  # as a C++ library of the same process does: Python's list lacks it
    try:
        (out,) = run_ranks(lambda rank, group: ulysses_attention(q, q, q, group, policy=policy), 1)
    finally:
        _C.unregister_backend("doubled")
    assert max_error(out, 2 * oracle(q, q, q)[0]) < 1e-5


def test_backend_name_unknown_is_refused_with_the_known_names() -> None:
    def call(rank: int) -> Any:
        return arguments(backend_name="ulyses")

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP001", 'backend_name="ulyses"', "Known: ulysses")
    assert_fixes_work(WORLD, call, text, "CP001")


def test_require_seq_divisible_false_takes_shards_of_any_length() -> None:
    def call(rank: int, **options: Any) -> Any:
        return arguments(rows=(5, 3)[rank], **options)

    text = assert_refused(outcomes(WORLD, call), RuntimeError, "CP013", "[5, 3]")
    assert "require_seq_divisible=False" in text
    assert_accepted(outcomes(WORLD, lambda rank: call(rank, require_seq_divisible=False)))


def test_require_seq_divisible_false_is_uneven_and_right() -> None:
    inputs = [torch.randn(1, 8, 4, 8) for _ in range(3)]

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        shards = (x[:, :5] if rank == 0 else x[:, 5:] for x in inputs)
        return ulysses_attention(*shards, group, policy=UlyssesContextParallelPolicy(require_seq_divisible=False))

    assert max_error(torch.cat(run_ranks(on_rank, WORLD), 1), oracle(*inputs)[0]) < 1e-5


def test_auto_pad_false_refuses_what_auto_pad_runs() -> None:
    def call(rank: int) -> Any:
        return arguments(rows=6, auto_pad=False)

    assert_accepted(outcomes(WORLD, lambda rank: arguments(rows=6)))
    text = assert_refused(outcomes(WORLD, call), ValueError, "CP011", "S_local=6", "pad_multiple=8", "16 (8 per rank)")
    assert_fixes_work(WORLD, call, text, "CP011", at_least=3)
    assert_accepted(outcomes(WORLD, lambda rank: arguments(rows=8, auto_pad=False)))  # the length it names


@pytest.mark.parametrize(("pad_multiple", "rows", "legal"), [(1, 6, True), (3, 6, True), (4, 6, False), (4, 8, True)])
def test_pad_multiple_changes_what_forward_takes(pad_multiple: int, rows: int, legal: bool) -> None:
    results = outcomes(WORLD, lambda rank: arguments(rows=rows, auto_pad=False, pad_multiple=pad_multiple))
    if legal:
        assert_accepted(results)
    else:
        assert_refused(results, ValueError, "CP011", f"S_local={rows}", f"pad_multiple={pad_multiple}")


def test_pad_multiple_changes_the_rows_of_a_layout() -> None:
    for pad_multiple, rows in ((1, 5), (4, 8), (8, 8), (16, 16)):
        policy = UlyssesContextParallelPolicy(pad_multiple=pad_multiple)
        layout = SequenceLayout(9, WORLD, policy)
        assert layout.padded_lengths == (rows, rows) and sum(layout.lengths) == 9
        results = outcomes(WORLD, lambda rank: arguments(rows=rows, policy=policy, layout=layout))  # noqa: B023
        assert_accepted(results)
        padding = rows - layout.lengths[1]
        assert padding == 0 or not results[1][:, -padding:].any()


def test_kv_must_be_global_false_is_refused() -> None:
    def call(rank: int) -> Any:
        return arguments(kv_must_be_global=False)

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP004", "kv_must_be_global=False")
    assert_fixes_work(WORLD, call, text, "CP004")


FORMATS = {"bshd": 1, "bhsd": 2, "sbhd": 0}  # with the dimension of the sequence


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("qkv_format", FORMATS)
def test_output_restore_dim_is_the_sequence_dimension_of_the_calls_format(qkv_format: str, dim: int) -> None:
    def call(rank: int) -> Any:
        return arguments(qkv_format=qkv_format, output_restore_dim=dim)

    if dim == FORMATS[qkv_format]:
        assert_accepted(outcomes(WORLD, call))
        return
    text = assert_refused(outcomes(WORLD, call), ValueError, "CP005", f"output_restore_dim={dim}", qkv_format)
    assert f"Fix: output_restore_dim={FORMATS[qkv_format]}. [CP005]" in text
    assert_fixes_work(WORLD, call, text, "CP005")


@pytest.mark.parametrize("qkv_format", FORMATS)
def test_a_call_without_a_policy_follows_its_format(qkv_format: str) -> None:
    assert_accepted(outcomes(WORLD, lambda rank: arguments(qkv_format=qkv_format)))


@pytest.mark.parametrize("dim", [3, -1, -3])
def test_output_restore_dim_of_no_format_is_refused(dim: int) -> None:
    def call(rank: int) -> Any:
        return arguments(output_restore_dim=dim)

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP005", f"output_restore_dim={dim}")
    assert "1 for bshd, 2 for bhsd, 0 for sbhd. Fix: output_restore_dim=1. [CP005]" in text
    assert_fixes_work(WORLD, call, text, "CP005")


def test_base_processor_other_than_ours_is_refused() -> None:
    def call(rank: int) -> Any:
        return arguments(base_processor="AttnProcessor2_0")

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP002", 'base_processor="AttnProcessor2_0"')
    assert_fixes_work(WORLD, call, text, "CP002")


@pytest.mark.parametrize(
    ("checks", "fault"),
    [
        (CHECKS[:2], "lacks output_restore_dim"),
        (("seq_divisible", "kv_global_gatherd", "output_restore_dim"), "unknown kv_global_gatherd"),
        ((), "lacks seq_divisible, kv_global_gathered, output_restore_dim"),
        ("seq_divisible", "lacks"),
        ((*CHECKS, "kv\nstrategy=allgather_kv"), "unknown kv strategy=allgather_kv"),
    ],
)
def test_required_checks_cannot_be_removed_or_misspelt(checks: Any, fault: str) -> None:
    def call(rank: int) -> Any:
        return arguments(required_checks=checks)

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP003", fault, "Known: " + ", ".join(CHECKS))
    assert_fixes_work(WORLD, call, text, "CP003")


def test_required_checks_in_another_order_are_the_same() -> None:
    assert_accepted(outcomes(WORLD, lambda rank: arguments(required_checks=CHECKS[::-1])))


def test_all_wrong_fields_are_reported_at_once() -> None:
    results = outcomes(WORLD, lambda rank: arguments(kv_must_be_global=False, output_restore_dim=2, pad_multiple=-1))
    for error_id in ("CP004", "CP005", "CP006"):
        assert_text(str(results[1]), error_id)


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_multiple", [0, -8])
def test_cp006_pad_multiple_must_be_positive(pad_multiple: int) -> None:
    def call(rank: int) -> Any:
        return arguments(pad_multiple=pad_multiple)

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP006", f"pad_multiple={pad_multiple}")
    assert_fixes_work(WORLD, call, text, "CP006")


@pytest.mark.parametrize(
    ("seq_len", "cp_size", "name"), [(0, 4, "seq_len=0"), (-3, 4, "seq_len=-3"), (8, 0, "cp_size=0")]
)
def test_cp006_lengths_and_ranks_must_be_positive(seq_len: int, cp_size: int, name: str) -> None:
    policy = UlyssesContextParallelPolicy()
    for make in (policy.padded_seq_len, SequenceLayout):
        with pytest.raises(ValueError) as caught:
            make(seq_len, cp_size)
        assert_text(str(caught.value), "CP006", name)
    (text,) = policy.validate_config(seq_len, cp_size)
    assert_text(text, "CP006", name)
    fixed = {"seq_len": seq_len, "cp_size": cp_size}
    field, value = re.findall(r"Fix: (\w+)=(\d+)", text)[0]
    fixed[field] = int(value)
    assert policy.validate_config(**fixed) == [] or field == "cp_size"
    assert policy.padded_seq_len(**fixed) > 0


@pytest.mark.parametrize("seq_len", [2**63 - 1, 2**63, 2**100, -(2**70)])
def test_cp007_lengths_beyond_64_bits(seq_len: int) -> None:
    policy = UlyssesContextParallelPolicy()
    for make in (policy.padded_seq_len, SequenceLayout):
        with pytest.raises(ValueError, match=str(seq_len)) as caught:
            make(seq_len, 4)
        assert_text(str(caught.value), "CP007", str(seq_len))
    assert any(text.endswith("[CP007]") for text in policy.validate_config(seq_len, 4))
    assert policy.padded_seq_len(2**62, 4) == 2**62


@pytest.mark.parametrize(("cp_size", "pad_multiple"), [(2**70, 8), (4, 2**70), (4, 2**62)])
def test_cp007_ranks_and_multiples_beyond_64_bits(cp_size: int, pad_multiple: int) -> None:
    policy = UlyssesContextParallelPolicy(pad_multiple=pad_multiple)
    with pytest.raises(ValueError) as caught:
        policy.padded_seq_len(3000, cp_size)
    assert_text(str(caught.value), "CP007")
    assert any(text.endswith("[CP007]") for text in policy.validate_config(3000, cp_size))


def test_cp007_in_the_operation() -> None:
    def call(rank: int) -> Any:
        return arguments(pad_multiple=2**70)

    assert_refused(outcomes(WORLD, call), ValueError, "CP007", str(2**70))
    assert_refused(outcomes(WORLD, lambda rank: arguments(cp_size=2**70)), ValueError, "CP007", str(2**70))
    assert_accepted(outcomes(WORLD, lambda rank: arguments(pad_multiple=2**62)))  # its fix: between 1 and 2^62


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({"policy": {}}, "UlyssesContextParallelPolicy"), ({"mask_layout": "global"}, "MaskLayout"),
     ({"joint": torch.zeros(1, 2, 4, 8)}, "JointTokens"),
     ({"joint": (torch.zeros(64, 8),) * 3}, "JointTokens"), ({"layout": (8,)}, "SequenceLayout"),
     ({"kv_layout": "8"}, "SequenceLayout")],
)  # fmt: skip
def test_a_value_of_another_type_is_a_type_error_that_names_it(options: dict[str, Any], wanted: str) -> None:
    (name,) = options
    q = torch.randn(1, 8, 4, 8)

    def call(rank: int, group: Any) -> None:
        with pytest.raises(TypeError, match=rf"{name}=.* is not a {wanted}\. Fix: {name}: ") as caught:
            ulysses_attention(q, q, q, group, **options)
        assert len(str(caught.value)) < 300  # a tuple of tensors is named, not printed

    run_ranks(call, 2)
