"""The doctor names every wrong backend by what it does, under any name, and accuses no right one."""

from __future__ import annotations

import json
import math
import random
import re
import string
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import backend_cases
from mutants.option_parts import OptionSteps, attention_with_options
from oracle import oracle
from ulysses_attention import _C, run_ranks
from ulysses_attention.doctor.run import examine, select
from ulysses_attention.doctor.targets import as_target

#: Per mutant: kind and sentence of each finding. "#" is a number, see below; "*" the rest of a text.
SENTENCES: dict[str, dict[str, str]] = json.loads((backend_cases.TESTS / "mutant_sentences.json").read_text())
MUTANTS = {path.stem: path for path in backend_cases.MUTANTS}
#: One rank waits for good where the number of tokens is odd: only such a case, or the hang limit counts 12 times.
ONE_CASE = {"waits_forever": "uneven_shards/W2/float32/S15-H4-B2"}
#: Faults that the first shape of each feature does not show: every shape of one feature.
ALL_SHAPES = {
    "causal_without_the_text": "joint_tokens/W2/float32/*",
    "replicated_keys_gathered": "replicated_kv/W2/float32/*",
    "softcap_behind_the_mask": "softcap/W2/float32/*",
}
#: The features in which a fault of an option shows; it must not show in any other.
MASKS = ("attn_mask", "query_mask", "head_mask", "sharded_mask")
BIASES = ("additive_mask", "mask_gradient")
TEXT = ("joint_tokens", "joint_suffix", "joint_valid_lens")
SHOWS_IN = {
    "backward_without_attn_mask": {*MASKS, *BIASES},
    "causal_shows_the_suffix": {"joint_suffix"},
    "causal_without_the_text": {"joint_tokens"},
    "lse_gradient_dropped": {"lse_gradient"},
    "mask_as_bias": {*MASKS},
    "mask_ignored": {*MASKS, *BIASES},
    "mask_inverted": {*MASKS},
    "mask_of_own_keys_for_the_first": {"sharded_mask"},
    "mask_of_the_first_heads": {"head_mask", *BIASES},
    "mask_of_the_first_rows": {"query_mask", *BIASES},
    "replicated_keys_gathered": {"replicated_kv"},
    "restored_in_bshd": {"qkv_format"},
    "sinks_ignored": {"sinks"},
    "sinks_on_rank_0": {"sinks"},
    "sinks_once_per_rank": {"sinks"},
    "softcap_behind_the_mask": {"softcap"},
    "softcap_ignored": {"softcap"},
    "text_counted_per_rank": {*TEXT},
    "text_gradients_summed_twice": {*TEXT},
    "text_keys_sharded": {*TEXT},
    "valid_lens_ignored": {"joint_valid_lens"},
}
#: Numbers of random inputs without a closed form: 16-bit arithmetic, or an answer to another question.
BOUNDS = {
    "precision": (1e-4, 3e-2),
    "strides": (0.1, 10.0),
    "state": (0.1, 10.0),
    "lse_gradient": (0.1, 10.0),
    "option_backward": (0.1, 10.0),
    "softcap_ignored": (1e-6, 10.0),
}
#: Those that float64 attention gives exactly, in a case of two ranks.
WITH_A_CLOSED_FORM = {
    "lse_in_base_2": "return_lse/W2/*",
    "lse_of_the_own_keys": "return_lse/W2/*",
    "backward_with_the_default_scale": "softmax_scale/W2/*",
    "backward_without_the_mask": "is_causal/W2/*",
}


class _Asked(_C.DoctorRanks):
    """Ranks that are threads; keeps the inputs of the first question: a case itself, before it is looked into."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self._target = as_target(attention)
        self.inputs: list[torch.Tensor] = []

    def ask(self, question: Any) -> list[Any]:
        self.inputs = self.inputs or question.__getstate__()[1]
        return run_ranks(lambda rank, group: _C.answer_on_rank(question, self._target, group), question.case.cp_size)


def _examine(path: Path, cases: str = "", quick: bool = True) -> Any:
    module = backend_cases.load(path)
    released = threading.Event()
    if hasattr(module, "threading"):  # a rank that waits for good, until the examination is over
        module.threading = SimpleNamespace(Event=lambda: released)
    try:
        return examine(getattr(module, "Backend", None) or module.attention, quick=quick, cases=cases)
    finally:
        released.set()


def _pattern(sentence: str) -> str:
    return re.escape(sentence).replace(r"\#", r"(-?\d+(?:\.\d+)?(?:e-\d+)?)").replace(r"\*", ".*")


def _assert_named(report: Any, expected: dict[str, str]) -> None:
    assert report["exit_status"] == 1
    given = {finding["kind"]: finding["sentence"] for finding in report["findings"]}
    assert set(given) == set(expected), given
    for kind, sentence in expected.items():
        match = re.fullmatch(_pattern(sentence), given[kind], re.DOTALL)
        assert match, given[kind]
        low, high = BOUNDS.get(kind, (-math.inf, math.inf))
        assert all(low < float(number) < high for number in match.groups()), given[kind]


def _renamed(path: Path, folder: Path) -> Path:
    """The file under a random name, its class and function names replaced by random ones."""
    chance = random.Random(path.stem)
    word = lambda: "".join(chance.choices(string.ascii_lowercase, k=9))  # noqa: E731
    text = path.read_text()
    text = re.sub(r'\A"""(.|\n)*?"""', '""""""', text)  # the docstring tells the fault
    for name in sorted(set(re.findall(r"^class (\w+)|^def (\w+)", text, re.MULTILINE)), reverse=True):
        name = name[0] or name[1]
        if name not in ("attention", "Backend"):
            text = re.sub(rf"\b{name}\b", word(), text)
    copy = folder / f"{word()}.py"
    copy.write_text(text)
    return copy


def test_every_mutant_has_its_sentences() -> None:
    assert set(SENTENCES) == set(MUTANTS)
    assert len(MUTANTS) >= 30


def _examine_as(name: str, path: Path) -> Any:
    if name in ALL_SHAPES:
        return _examine(path, ALL_SHAPES[name], quick=False)
    return _examine(path, ONE_CASE.get(name, ""))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_doctor_names_the_fault(name: str) -> None:
    report = _examine_as(name, MUTANTS[name])
    _assert_named(report, SENTENCES[name])
    if name in SHOWS_IN:
        assert {case["feature"] for case in report["cases"] if case["verdict"] == "wrong"} == SHOWS_IN[name]


@pytest.mark.parametrize("name", MUTANTS)
def test_the_same_sentences_under_other_names(name: str, tmp_path: Path) -> None:
    _assert_named(_examine_as(name, _renamed(MUTANTS[name], tmp_path)), SENTENCES[name])


def test_the_steps_of_option_mutants_are_right_in_every_shape() -> None:
    assert {path.stem for path in MUTANTS.values() if "option_parts" in path.read_text()} == set(SHOWS_IN)
    report = examine(attention_with_options(OptionSteps))
    assert report["findings"] == []
    refused = {case["feature"] for case in report["cases"] if case["verdict"] != "ok"}
    assert refused == {feature for feature, id in _C.capabilities("ulysses").items() if id} - {"bottom_right_causal"}


#: Cases so small that the numbers of a fault are known by heart: those of equal scores.
BY_HEART = {
    "mask_as_bias": (
        {"lengths": [1, 1], "mask": "key"},
        f"gives key 0 the weight {math.e / (math.e + 1):.6g} instead of 1",  # scores 1 and 0: a visible key, a hidden
    ),
    "text_counted_per_rank": (
        {"lengths": [2, 2], "text_len": 2},
        "image keys get 0.5 of the weight of query 0 instead of 0.666667",
    ),
    "replicated_keys_gathered": (
        {"lengths": [4, 4], "kv_lengths": [3, 3], "replicated_kv": True, "return_lse": True},
        f"it is {math.log(12):.6g} (ln 12) instead of {math.log(6):.6g} (ln 6)",
    ),
}


@pytest.mark.parametrize("name", BY_HEART)
def test_the_numbers_of_the_smallest_case(name: str) -> None:
    fields, words = BY_HEART[name]
    lengths = fields["lengths"]
    case = _C.Case({"batch": 1, "padded_lengths": lengths, "kv_lengths": lengths, **fields})
    ((result, finding),) = _C.examine_case(_Asked(backend_cases.load(MUTANTS[name]).attention), case)
    assert result["verdict"] == "wrong"
    assert words in finding["sentence"]


def _right_numbers(name: str, case: Any, q: Any, k: Any, v: Any, grad_out: Any) -> list[float]:
    """The numbers of a mutant's sentence, in their order."""
    if "lse" in name:
        _, lse = oracle(q, k, v)
        if name == "lse_in_base_2":
            return [float(lse[0, 0, 0]) / math.log(2), float(lse[0, 0, 0])]
        shards = zip(*(x.chunk(2, 1) for x in (q, k, v)), strict=True)
        own = torch.cat([oracle(*shard)[1] for shard in shards], 2)
        return [float((own - lse).abs().max())]
    # With weights P the output is P·v and dv is Pᵀ·grad_out, so dv·v = grad_out·(P·v), and here P is another.
    of_dv, of_out = oracle(q, k, v), oracle(q, k, v, case.is_causal, case.softmax_scale or None)
    return [float((grad_out.double() * out).sum()) for out, _ in (of_dv, of_out)]


@pytest.mark.parametrize("name", WITH_A_CLOSED_FORM)
def test_the_numbers_of_a_sentence_are_those_of_float64(name: str) -> None:
    attention = backend_cases.load(MUTANTS[name]).attention
    (case,) = _C.make_cases(select(attention, worlds=[2], cases=WITH_A_CLOSED_FORM[name], quick=True))
    ranks = _Asked(attention)
    case = _C.Case({**case.fields(), "batch": 1})  # a finding speaks of one sequence
    ((_, finding),) = _C.examine_case(ranks, case)
    (pattern,) = SENTENCES[name].values()
    match = re.match(_pattern(pattern.partition(" (")[0]), finding["sentence"])
    assert match, finding["sentence"]
    expected = _right_numbers(name, case, *ranks.inputs[:4])
    assert [float(number) for number in match.groups()] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("path", backend_cases.RIGHT, ids=lambda path: path.stem)
def test_no_right_backend_is_accused(path: Path) -> None:
    report = _examine(path, quick=False)
    assert report["findings"] == []
    assert report["exit_status"] == 0
    assert report["summary"]["ok"] >= 60, "so many cases that it was really asked"
