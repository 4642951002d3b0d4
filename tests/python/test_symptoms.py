"""The guide: its symptoms provoked, its text up to date, and its table true of the operation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import oracle
from refusals import arguments, assert_accepted, assert_refused, assert_text, change, outcomes, repairs
from ulysses_attention import (
    _C,
    JointTokens,
    SequenceLayout,
    UlyssesAttentionProcessor,
    UlyssesContextParallelPolicy,
    check_attention,
    run_ranks,
    ulysses_attention,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
SEQ_LEN, WORLD, ROWS = 4096, 4, 1024


def _shards(rank: int) -> list[torch.Tensor]:
    """q, k, v of the rank: one head of size 8."""
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(1, SEQ_LEN, 1, 8, generator=generator) for _ in range(3))
    return [x[:, ROWS * rank : ROWS * (rank + 1)] for x in whole]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _symptom(number: int) -> str:
    """The guide's section of the number-th symptom."""
    symptoms = _C.render_guide().split("\n## ")[1]
    assert symptoms.startswith("Symptoms")
    return symptoms.split("\n### ")[number]


# --- the four symptoms with S = 4096 on 4 ranks ---------------------------------------------------------------------

EXPANDED = "The expanded size of the tensor (4096) must match the existing size (1024) at non-singleton dimension 1"
SIZES = "The size of tensor a (1024) must match the size of tensor b (4096) at non-singleton dimension 1"


class _NotRestored(UlyssesAttentionProcessor):
    """Gathers the output over the group and forgets to cut it back to the rank's rows."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        return _attend(q, k, v)

    def restore(self, out: torch.Tensor, lse: Any, plan: Any, group: Any) -> torch.Tensor:
        shards = [torch.empty_like(out) for _ in range(plan.cp_size)]
        group.allgather([shards], [out.contiguous()]).wait()
        return torch.cat(shards, 1)


def _forward(backend: UlyssesAttentionProcessor, rank: int, group: Any) -> Any:
    try:
        return backend.forward(*_shards(rank), group, strategy="allgather_kv")
    except Exception as error:
        return error


def test_symptom_1_the_expanded_size_of_the_tensor() -> None:
    assert _symptom(1).startswith(f"`{EXPANDED}`") and "CP052" in _symptom(1)
    with pytest.raises(RuntimeError, match=re.escape(EXPANDED)):
        torch.zeros(1, ROWS, 8).expand(1, SEQ_LEN, 8)  # without us: a shard meets the gathered length
    errors = run_ranks(lambda rank, group: _forward(_NotRestored(), rank, group), WORLD)
    text = assert_refused(errors, ValueError, "CP052", "[1, 4096, 1, 8]", "q [1, 1024, 1, 8]", "dimension, 1")
    assert "return out of shape [1, 1024, 1, 8]" in text


def test_symptom_1_a_sequence_that_was_never_sharded() -> None:
    """The same words for q and k: the whole sequence is passed where the layout has a shard."""
    layout = SequenceLayout(SEQ_LEN, WORLD)

    def call(rank: int) -> Any:
        return arguments(rows=SEQ_LEN, heads=1, layout=layout)

    assert "CP012" in _symptom(1)
    assert_refused(outcomes(WORLD, call), ValueError, "CP012", "q has S_local=4096", "=1024", "k has S_local=4096")
    fixed = outcomes(WORLD, lambda rank: change(call(rank), **dict(zip("qkv", _shards(rank), strict=True))))
    assert_accepted(fixed)


def test_symptom_1_attend_returns_the_gathered_length() -> None:
    def call(rank: int) -> Any:
        q, k, v = _shards(rank)
        return arguments(q=q, k=k, v=v, strategy="allgather_kv", kernel=lambda q, k, v, call: k)

    assert_refused(outcomes(WORLD, call), ValueError, "CP052", "[1, 4096, 1, 8]", "[1, 1024, 1, 8]", "dimension 1")


def test_symptom_2_not_divisible_by_cp_size() -> None:
    section = _symptom(2)
    assert section.startswith("`context_parallel_size=4 but sequence length 3000 is not divisible by cp_size`")
    (text,) = UlyssesContextParallelPolicy().validate_config(3000, 4)
    assert text in section
    assert_text(text, "CP011", "seq_len=3000", "cp_size=4", "pad to 3008 (752 per rank)", "pad_multiple=1")
    for repair in repairs(text, "CP011"):
        assert UlyssesContextParallelPolicy(**repair).validate_config(3000, 4) == []
    assert UlyssesContextParallelPolicy().validate_config(3008, 4) == []
    strict = UlyssesContextParallelPolicy(auto_pad=False)
    with pytest.raises(ValueError) as caught:
        SequenceLayout(4095, WORLD, strict)
    assert_text(str(caught.value), "CP010", "seq_len=4095", "cp_size=4", "pad to 4096 (1024 per rank)", "auto_pad=True")
    assert SequenceLayout(4096, WORLD, strict).lengths == (ROWS,) * WORLD
    assert SequenceLayout(4095, WORLD, strict.replace(auto_pad=True)).padded_lengths == (ROWS,) * WORLD


def test_symptom_3_a_size_mismatch_behind_attention() -> None:
    assert _symptom(3).startswith(f"`{SIZES}`, behind attention")
    with pytest.raises(RuntimeError, match=re.escape(SIZES)):
        torch.zeros(1, ROWS, 1, 8) + torch.zeros(1, SEQ_LEN, 1, 8)  # without us: the residual of the block
    errors = run_ranks(lambda rank, group: _forward(_NotRestored(), rank, group), WORLD)
    assert_refused(errors, ValueError, "CP052", "4096", "1024", "dimension, 1")
    errors = outcomes(WORLD, lambda rank: arguments(output_restore_dim=2))
    assert_refused(errors, ValueError, "CP005", "output_restore_dim=2", "Fix: output_restore_dim=1")

    def right(rank: int, group: Any) -> torch.Tensor:
        q, k, v = _shards(rank)
        return q + ulysses_attention(q, k, v, group)

    assert all(x.shape == (1, ROWS, 1, 8) for x in run_ranks(right, WORLD))


class _OwnRepeated(UlyssesAttentionProcessor):
    """A rank's own K/V cp_size times: the right shape, the wrong content."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        return _attend(q, k, v)

    def exchange(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, group: Any) -> Any:
        return q, torch.cat([k] * plan.cp_size, 1), torch.cat([v] * plan.cp_size, 1)


def test_symptom_4_the_loss_is_too_high_and_there_is_no_error() -> None:
    section = _symptom(4)
    assert section.startswith("The loss is too high, and there is no error")
    assert "CP053" in section and "check_attention" in section and "3072" in section
    shards = [_shards(rank) for rank in range(WORLD)]
    expected = oracle(*(torch.cat(parts, 1) for parts in zip(*shards, strict=True)))[0]
    local = torch.cat([_attend(*shard) for shard in shards], 1)  # without us: no error, and wrong
    assert local.shape == expected.shape and (local - expected).abs().max() > 1e-2
    errors = run_ranks(lambda rank, group: _forward(_OwnRepeated(), rank, group), WORLD)
    text = assert_refused(errors, ValueError, "CP053", "are not what rank")
    assert "tokens 1024-2047 of K (head 0) are not what rank 1 holds" in text
    for check in run_ranks(lambda rank, group: check_attention(_attend, group), WORLD):
        assert check.diagnosis.startswith("each rank attends only to its own tokens: keys ")
    right = run_ranks(lambda rank, group: ulysses_attention(*_shards(rank), group), WORLD)
    assert (torch.cat(right, 1) - expected).abs().max() < 1e-5


def test_symptom_5_tensors_in_another_order_are_named_by_a_layout() -> None:
    assert _symptom(5).startswith("Right shapes, wrong numbers") and "q.transpose(1, 2)" in _symptom(5)
    layout = SequenceLayout(8 * WORLD, WORLD)

    def call(rank: int) -> Any:  # [B, H, S_local, D]
        return arguments(**{name: torch.randn(1, 4, 8, 16) for name in "qkv"}, layout=layout)

    text = assert_refused(outcomes(WORLD, call), ValueError, "CP012")
    assert "Fix: q.transpose(1, 2), if it is [B, H, S_local, D]" in text


def test_symptom_6_it_hangs() -> None:
    assert _symptom(6).startswith("It hangs") and "CP060" in _symptom(6) and "CP062" in _symptom(6)


# --- the committed documents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "command", "render"),
    [
        ("guide.md", "ulysses guide", _C.render_guide),
        ("errors.md", "ulysses guide --errors", _C.render_errors),
        ("capabilities.md", "ulysses guide --table", _C.render_capability_page),
    ],
    ids=["guide", "errors", "capabilities"],
)
def test_the_committed_document_is_what_the_code_renders(name: str, command: str, render: Any) -> None:
    text = render() if render().endswith("\n") else render() + "\n"
    assert (DOCS / name).read_text() == text, f"docs/{name} is stale: run `{command} > docs/{name}`"


def test_every_id_in_the_guide_exists() -> None:
    known = set(_C.error_ids())
    assert set(re.findall(r"CP\d{3}", _C.render_guide())) <= known
    assert set(re.findall(r"^\| (CP\d{3}) \|", _C.render_errors(), re.M)) == known


def test_links_and_code_of_the_guide() -> None:
    guide = (DOCS / "guide.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", guide):
        assert (DOCS / target).exists(), target
    blocks = re.findall(r"```python\n(.*?)```", guide, re.S)
    assert len(blocks) == 3  # a backend and a training step, which tests run, and the recipe
    recipe = (DOCS.parent / "python/ulysses_attention/recipe.py").read_text()
    assert blocks[2].strip() in recipe and "def context_parallel_attention" in blocks[2]


def test_the_backend_in_the_guide_is_right() -> None:
    from ulysses_attention import backends, unregister_backend

    (code,) = [b for b in re.findall(r"```python\n(.*?)```", _C.render_guide(), re.S) if "MyBackend" in b]
    exec(compile(code, "the guide", "exec"), {})
    try:
        assert "my_backend" in backends()
        inputs = [torch.randn(1, 16, h, 8) for h in (4, 2, 2)]

        def call(rank: int) -> Any:
            q, k, v = (x[:, 8 * rank : 8 * rank + 8] for x in inputs)
            return arguments(q=q, k=k, v=v, backend_name="my_backend", is_causal=True, softmax_scale=0.3)

        results = outcomes(2, call)
        assert_accepted(results)
        expected = oracle(*inputs, is_causal=True, softmax_scale=0.3)[0]
        assert (torch.cat(results, 1) - expected).abs().max() < 1e-5
    finally:
        unregister_backend("my_backend")


# --- the table is what the operation does ---------------------------------------------------------------------------


def _text(**options: Any) -> JointTokens:
    return JointTokens(*torch.ones(3, 1, 2, 4, 8), **options)


RAGGED = SequenceLayout.from_lengths([9, 7])
USES: dict[str, Any] = {  # a call on 2 ranks that uses the feature of each row
    "equal_shards": lambda rank: {},
    "uneven_shards": lambda rank: {"rows": RAGGED.lengths[rank], "layout": RAGGED},
    "empty_shards": lambda rank: {"rows": (8, 0)[rank], "layout": SequenceLayout.from_lengths([8, 0])},
    "padded_shards": lambda rank: {"layout": SequenceLayout(11, 2)},
    "uneven_heads": lambda rank: {"heads": 3},
    "grouped_kv": lambda rank: {"kv_heads": 2},
    "fewer_kv_heads_than_ranks": lambda rank: {"kv_heads": 1},
    "fewer_heads_than_ranks": lambda rank: {"heads": 1},
    "is_causal": lambda rank: {"is_causal": True},
    "bottom_right_causal": lambda rank: {"is_causal": True, "causal_alignment": "bottom_right"},
    "softmax_scale": lambda rank: {"softmax_scale": 0.5},
    "return_lse": lambda rank: {"return_lse": True},
    "cross_lengths": lambda rank: {
        **dict.fromkeys("kv", torch.randn(1, 5, 4, 8)),
        "layout": SequenceLayout(16, 2),
        "kv_layout": SequenceLayout.from_lengths([5, 5]),
    },
    "value_head_dim": lambda rank: {"v": torch.randn(1, 8, 4, 6)},
    "window": lambda rank: {"window": (2, 2)},
    "attn_mask": lambda rank: {"attn_mask": torch.arange(16).view(1, 16) < 13},
    "query_mask": lambda rank: {"attn_mask": torch.ones(1, 1, 16, 16, dtype=torch.bool).triu()},
    "head_mask": lambda rank: {"attn_mask": torch.arange(4).view(1, 4, 1, 1) >= torch.arange(16) // 4},
    "additive_mask": lambda rank: {"attn_mask": torch.randn(1, 1, 1, 16)},
    "sharded_mask": lambda rank: {"attn_mask": torch.arange(8).view(1, 8) < 5},
    "mask_gradient": lambda rank: {"attn_mask": torch.randn(1, 4, 16, 16).requires_grad_()},
    "replicated_kv": lambda rank: {"kv_role": "replicated", **dict.fromkeys("kv", torch.randn(1, 5, 4, 8))},
    "joint_tokens": lambda rank: {"joint": _text()},
    "joint_suffix": lambda rank: {"joint": _text(position="suffix")},
    "joint_valid_lens": lambda rank: {"joint": _text(valid_lens=[1])},
    "packed_sequences": lambda rank: {"cu_seqlens_q": torch.tensor([0, 16])},
    "dropout": lambda rank: {"dropout_p": 0.1},
    "qkv_format": lambda rank: {"qkv_format": "bhsd"},
    "sinks": lambda rank: {"sinks": torch.zeros(4)},
    "softcap": lambda rank: {"softcap": 5.0},
    "lse_gradient": lambda rank: {"return_lse": True, "q": torch.randn(1, 8, 4, 8).requires_grad_()},
    "hybrid_degree": lambda rank: {"ulysses_degree": 2},
    "head_tail_order": lambda rank: {"order": "head_tail"},
}


def _table() -> dict[tuple[str, str], str]:
    """{(feature, strategy): cell} from the guide's own text."""
    lines = [line.strip("| ").split(" | ") for line in _C.render_guide().splitlines() if line.startswith("| ")]
    header = next(line for line in lines if line[0] == "feature")
    rows = lines[lines.index(header) + 1 :][: len(USES)]
    strategies = [name.strip("`") for name in header[1:]]
    return {(row[0].strip("`"), s): cell for row in rows for s, cell in zip(strategies, row[1:], strict=True)}


def test_the_table_has_a_row_for_every_call_below() -> None:
    assert {feature for feature, _ in _table()} == set(USES)
    assert {strategy for _, strategy in _table()} == {"ulysses", "allgather_kv"}


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
@pytest.mark.parametrize("feature", USES)
def test_the_operation_does_what_the_table_says(feature: str, strategy: str) -> None:
    cell = _table()[feature, strategy]
    if feature == "head_tail_order":  # a layout refuses it before any call
        with pytest.raises(NotImplementedError, match=re.findall(r"CP\d{3}", cell)[0]):
            SequenceLayout(16, 2, **USES[feature](0))
        return
    results = outcomes(2, lambda rank: arguments(strategy=strategy, **USES[feature](rank)))
    if cell.startswith("yes: "):
        assert_accepted(results, feature)
    else:
        (error_id,) = re.findall(r"^no \((CP\d{3})\); instead: ", cell)
        assert_refused(results, NotImplementedError, error_id, feature, f'strategy="{strategy}"')
