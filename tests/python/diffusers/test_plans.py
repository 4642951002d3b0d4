"""Plans: printed for a model that we do not know, declared by a model itself, and wrong ones."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

import own_models
from same_model import (
    assert_output,
    call,
    call_without_gradient,
    family,
    hooks_of,
    one_process,
    over_threads,
    rebound_modules,
)
from ulysses_attention import run_ranks
from ulysses_attention.diffusers import FAMILIES, Attend, Gather, Segments, Shard, ShardingPlan, parallelize, verify
from ulysses_attention.diffusers.choose import own_plan, plan_for

IMAGE = Shard(1, "image")
Make = Callable[[], tuple[torch.nn.Module, dict[str, Any]]]


def _refusal(model: torch.nn.Module, **options: Any) -> str:
    """What parallelize says on a group of one rank; it leaves nothing behind."""

    def on_rank(rank: int, group: Any) -> str:
        with pytest.raises(NotImplementedError) as raised:
            parallelize(model, group, **options)
        return str(raised.value)

    text: str = run_ranks(on_rank, 1)[0]
    assert hooks_of(model) == 0 and not rebound_modules()
    return text


def printed_plan(text: str) -> ShardingPlan:
    """The plan at the end of an error, run as it is printed."""
    source = "from ulysses" + text.split("\n\nfrom ulysses")[1]
    names: dict[str, Any] = {}
    exec(compile(ast.parse(source), "printed", "exec"), names)
    plan = names["plan"]
    assert isinstance(plan, ShardingPlan)
    return plan


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: own_models.auraflow()[0], "(register tokens stand in front of the text; the draft below cuts them"),
        (own_models.hidream, "HiDreamImageTransformer2DModel (it puts other text tokens into every block"),
        (own_models.sana, "SanaTransformer2DModel (its attention is linear"),
        (lambda: own_models.own()[0], "no plan is known for OwnTransformer. Known: Chroma"),
    ],
)
def test_a_model_without_a_plan_is_refused_with_one_to_start_from(
    make: Callable[[], torch.nn.Module], reason: str
) -> None:
    model = make()
    text = _refusal(model)
    assert reason in text and "Fix: say how it is cut and pass plan=plan; then compare: verify(model" in text
    plan = printed_plan(text)
    assert plan.gather and plan.inputs and plan.attention
    assert ("# it has convolutions: if they mix" in text) == isinstance(model, diffusers.SanaTransformer2DModel)


def test_no_plan_is_printed_where_no_attention_can_be_set() -> None:
    bare, _ = own_models.own()
    bare.blocks = torch.nn.ModuleList(own_models.BareAttention() for _ in range(2))
    for model in (own_models.mochi(), bare):
        text = _refusal(model)
        name = type(model).__name__
        assert f"No attention with a processor that can be set was found in {name}, so no plan can be writ" in text
        assert "Fix: a model with a list of blocks" in text and "ShardingPlan(" not in text


def test_one_name_of_a_stream_is_no_tuple_of_names() -> None:
    with pytest.raises(TypeError, match=r"q='image' is a string, not a tuple.*Fix: Attend\(\(\"image\",\)\)"):
        Attend("image")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kv='text' is a string, not a tuple.*Fix: kv=\(\"text\",\)"):
        Attend(("image",), kv="text")  # type: ignore[arg-type]


def test_linear_attention_is_refused_with_a_plan_too() -> None:
    model = own_models.sana()
    text = _refusal(model, plan=printed_plan(_refusal(model)))
    assert "the attention of SanaLinearAttnProcessor2_0 cannot be exchanged" in text


@pytest.mark.parametrize("make", [own_models.auraflow, own_models.cogview4, own_models.pixart, own_models.own])
def test_the_printed_plan_is_right_as_printed(make: Make) -> None:
    model, inputs = make()
    plan = printed_plan(_refusal(model))
    models = [copy.deepcopy(model) for _ in range(2)]
    for result in run_ranks(lambda rank, group: verify(models[rank], inputs, group, plan=plan), 2):
        assert result.ok and not result.left_whole, str(result)
    over_threads(one_process(model, inputs), 2, plan=plan)


def test_a_plan_of_the_callers_own_for_a_class_under_a_known_name() -> None:
    """A subclass of a known transformer gets its plan."""

    class Mine(type(family("wan").model)):  # type: ignore[misc]
        pass

    model = copy.deepcopy(family("wan").model)
    model.__class__ = Mine
    assert plan_for(model) is FAMILIES["WanTransformer3DModel"]


def test_a_plan_that_the_model_declares_itself() -> None:
    model, inputs = own_models.chrono_edit()
    assert type(model).__name__ not in FAMILIES
    assert plan_for(model) == own_plan(model)
    over_threads(one_process(model, inputs), 2)
    over_threads(one_process(model, inputs), 4)


def test_a_declared_plan_that_gathers_between_modules_computes_and_does_not_train() -> None:
    """What stands between its cuts is whole on every rank, so that gradients are no partial sums."""
    model, inputs = own_models.helios()
    wanted = call_without_gradient(model, inputs)
    models = [copy.deepcopy(model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        with parallelize(models[rank], group):
            assert_output(call_without_gradient(models[rank], inputs), wanted)
            with pytest.raises(
                NotImplementedError, match=r"not for gradients. Fix: torch.no_grad\(\); to train, a plan"
            ):
                call(models[rank], inputs)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("name", ["flux", "flux2", "wan", "qwen"])
def test_what_known_models_declare_themselves_is_right_as_well(name: str) -> None:
    over_threads(family(name, masked=False), 2, plan=own_plan(family(name).model))


def _fails(name: str, plan: ShardingPlan, text: str) -> None:
    """On each of 2 ranks the forward is refused with this text."""
    wanted = family(name)
    models = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        with parallelize(models[rank], group, plan=plan), pytest.raises((ValueError, NotImplementedError), match=text):
            call(models[rank], wanted.inputs)

    run_ranks(on_rank, 2)


def _changed(name: str, **changes: Any) -> ShardingPlan:
    return dataclasses.replace(FAMILIES[type(family(name).model).__name__], **changes)


def test_a_stream_of_another_length_is_refused() -> None:
    inputs = {"": {"hidden_states": IMAGE, "encoder_hidden_states": IMAGE}}
    _fails(
        "flux", _changed("flux", inputs=inputs), r"7 tokens is declared as the stream 'image', which has 21. Fix: an"
    )


def test_a_stream_that_no_tensor_starts_is_refused() -> None:
    attention = {"**.attn": Attend(("txt", "image"))}
    text = r"stream 'txt' before a tensor of it was sharded \(known: image, text\)"
    _fails("flux", _changed("flux", attention=attention), text)
    _fails(
        "flux", _changed("flux", gather={"proj_out": Gather(1, "out")}), r"stream 'out' before.*Fix: a Shard\(dim, 'o"
    )


def test_an_attention_that_is_given_other_tokens_than_declared_is_refused() -> None:
    _fails(
        "flux",
        _changed("flux", attention={"**.attn": Attend(("image",))}),
        r"q has S_local=15 rows, layout\.padded_lengths\[0\]=11.*\[CP012\]",
    )


def test_segments_of_another_length_are_refused() -> None:
    inputs = dict(FAMILIES["ChromaTransformer2DModel"].inputs[""])
    inputs["attention_mask"] = Segments(1, ("image", "image"))
    _fails(
        "chroma",
        _changed("chroma", inputs={"": inputs}),
        r"with 28 tokens .*\('image', 'image'\) in a row, which have \[21, 21\]. Fix: another",
    )


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("flux2", {"kv_cache": object()}, r"Flux2Transformer2DModel with kv_cache=: the cached keys"),
        ("ltx2", {"video_self_attention_mask": torch.ones(2, 27, 27)}, "it has a row for each query"),
        ("z_image", {"controlnet_block_samples": {0: torch.ones(1)}}, "its residuals are whole"),
        (
            "z_image",
            {"siglip_feats": [1], "image_noise_mask": [1]},
            "another stream; .*image_noise_mask=: it is a list",
        ),
    ],
)
def test_arguments_that_a_plan_does_not_cover_are_refused(name: str, given: dict[str, Any], text: str) -> None:
    wanted = family(name)
    models = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        with parallelize(models[rank], group):
            with pytest.raises(NotImplementedError, match=rf"{text}.*Fix: a call without it"):
                call_without_gradient(models[rank], wanted.inputs | given)
            call_without_gradient(models[rank], wanted.inputs)

    run_ranks(on_rank, 2)
