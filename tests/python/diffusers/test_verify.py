"""verify: a right model is the same model; a wrong plan, or ranks that hold different things, are found and named."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention

import own_models
from families import wake
from same_model import call_without_gradient, family, hooks_of, processors_of
from ulysses_attention import run_ranks
from ulysses_attention.diffusers import (
    FAMILIES,
    Attend,
    Gather,
    Shard,
    ShardingPlan,
    Verification,
    parallelize,
    verify,
)

OWN_PLAN = ShardingPlan(
    inputs={"blocks.0": {"hidden_states": Shard(1, "image")}},
    attention={"**.attn1": Attend(("image",)), "**.attn2": "local"},
    gather={"proj_out": Gather(1, "image")},
)


def _verify(name: str, plan: ShardingPlan | None = None, world: int = 2) -> Verification:
    wanted = family(name)
    models = [copy.deepcopy(wanted.model) for _ in range(world)]
    options = {} if plan is None else {"plan": plan}
    results = run_ranks(lambda rank, group: verify(models[rank], wanted.inputs, group, **options), world)
    assert all(result == results[0] for result in results)  # the same on every rank
    for model in models:
        assert hooks_of(model) == 0 and not model.training
    first: Verification = results[0]
    return first


@pytest.mark.parametrize("name", ["flux", "z_image", "ltx2", "hunyuan"])
def test_a_right_model_is_the_same(name: str) -> None:
    result = _verify(name)
    assert result.ok and not result.wrong and not result.left_whole, str(result)
    assert result.output_error < 1e-5 and max(result.gradient_errors.values()) < 1e-4
    assert str(result).endswith(": the same model") and str(result).count("\n") == 0
    named = {name for name, _ in family(name).model.named_parameters()}
    assert set(result.gradient_errors) == named


def test_more_ranks() -> None:
    assert _verify("qwen", world=4).ok


def test_attention_to_the_own_tokens_is_found() -> None:
    result = _verify("flux", dataclasses.replace(FAMILIES["FluxTransformer2DModel"], attention={"**": "local"}))
    assert not result.ok and result.output_error > 1e-2
    assert "NOT the same model" in str(result)
    assert "wrong gradient: " in str(result) and "more" in str(result).splitlines()[-1]


def test_a_gather_that_sums_gradients_at_the_end_is_found() -> None:
    plan = FAMILIES["WanTransformer3DModel"]
    result = _verify("wan", dataclasses.replace(plan, gather={"proj_out": Gather(1, "image", grad="sum")}))
    assert not result.ok and result.output_error < 1e-5
    assert "proj_out.weight" in result.wrong
    assert result.gradient_errors["proj_out.weight"] == pytest.approx(1.0, rel=1e-3)  # counted twice


def test_a_gather_that_slices_gradients_in_the_middle_is_found() -> None:
    plan = FAMILIES["Lumina2Transformer2DModel"]
    gather = {**plan.gather, "noise_refiner.-1": Gather(1, "image")}
    result = _verify("lumina2", dataclasses.replace(plan, gather=gather))
    assert not result.ok and result.output_error < 1e-5
    assert any(name.startswith("noise_refiner") for name in result.wrong)


def test_a_stream_that_is_left_out_is_found() -> None:
    """Video sharded, audio whole and yet counted as one rank's keys: wrong without an error, and named."""
    plan = FAMILIES["LTX2VideoTransformer3DModel"]
    inputs = {"": {"hidden_states": Shard(1, "image"), "timestep": Shard(1, "image", ndim=2)}}
    outputs = {name: rule for name, rule in plan.outputs.items() if "audio" not in name}
    attention = {**plan.attention, "**.audio_attn1": "local", "**.audio_to_video_attn": "local"}
    attention["**.video_to_audio_attn"] = "local"
    gather = {"proj_out": Gather(1, "image")}
    result = _verify(
        "ltx2", dataclasses.replace(plan, inputs=inputs, outputs=outputs, attention=attention, gather=gather)
    )
    assert not result.ok and result.output_error > 1e-3


def _own(
    make: Callable[[], tuple[torch.nn.Module, dict[str, Any]]], plan: ShardingPlan, change: Any = None
) -> list[Any]:
    """verify on 2 ranks: its results, or what it raised on each."""
    made = [make() for _ in range(2)]

    def on_rank(rank: int, group: Any) -> Any:
        model, inputs = made[rank]
        if change is not None:
            change(rank, model, inputs)
        try:
            return verify(model, inputs, group, plan=plan)
        except RuntimeError as error:
            return error
        finally:
            assert hooks_of(model) == 0 and all("Ulysses" not in str(type(p)) for p in processors_of(model).values())

    return run_ranks(on_rank, 2)


def test_a_tensor_that_the_plan_does_not_list_is_named() -> None:
    """A model with one more tensor over tokens than its predecessor."""
    assert all(result.ok for result in _own(own_models.own, OWN_PLAN))
    for error in _own(own_models.own_with_strength, OWN_PLAN):
        assert isinstance(error, RuntimeError)
        assert "the parallelized OwnTransformer failed" in str(error)
        assert "beside sharded ones: blocks.0: strength [2, 13]. Fix: a Shard for each in the plan" in str(error)
    inputs = {"blocks.0": {"hidden_states": Shard(1, "image")}, "blocks.*": {"strength": Shard(1, "image")}}
    for result in _own(own_models.own_with_strength, dataclasses.replace(OWN_PLAN, inputs=inputs)):
        assert result.ok and not result.left_whole, str(result)


class NestedBlock(own_models.Block):
    """Takes what has a number for each token in a dictionary of lists."""

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, strength: Any = None) -> torch.Tensor:
        return super().forward(hidden_states, text, strength["of"][0])


class Nested(own_models.OwnTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(NestedBlock() for _ in range(2))

    def forward(self, hidden_states: Any, encoder_hidden_states: Any, strength: Any = None) -> Any:  # type: ignore[override]
        return super().forward(hidden_states, encoder_hidden_states, {"of": [strength]})  # type: ignore[arg-type]


def test_a_tensor_inside_of_others_is_named() -> None:
    def nested() -> tuple[torch.nn.Module, dict[str, Any]]:
        return wake(Nested()), own_models.own_with_strength()[1]

    for error in _own(nested, OWN_PLAN):
        assert "beside sharded ones: blocks.0: strength['of'][0] [2, 13]. Fix: a Shard for each" in str(error)


def test_where_no_tensor_is_left_whole_the_error_says_where_to_look() -> None:
    plan = dataclasses.replace(OWN_PLAN, attention={"**": Attend(("image",))})  # as many keys as text, 5, in attn2
    for error in _own(own_models.own, plan):
        assert isinstance(error, RuntimeError)
        assert "No tensor of full length was seen in the modules' arguments. Look at: which dim each Shard" in str(
            error
        )
        assert "a Shard for each" not in str(error)


@pytest.mark.parametrize("what", ["hidden_states", "weight"])
def test_ranks_that_hold_different_things_are_named(what: str) -> None:
    def change(rank: int, model: Any, inputs: dict[str, Any]) -> None:
        if rank == 1 and what == "weight":
            model.proj_in.weight.data[0, 0] += 1
        if rank == 1 and what == "hidden_states":  # such as noise from another seed
            inputs["hidden_states"] = inputs["hidden_states"] + 1e-3

    name = "inputs['hidden_states']" if what == "hidden_states" else "proj_in.weight"
    for error in _own(own_models.own, OWN_PLAN, change):
        assert isinstance(error, RuntimeError)
        assert name in str(error) and "[CP068]" in str(error) and "Fix: " in str(error)


def test_gradients_and_mode_of_the_model_are_kept() -> None:
    model, inputs = own_models.own()
    model.train()
    model.proj_in.weight.grad = torch.full_like(model.proj_in.weight, 3.0)  # type: ignore[union-attr,arg-type]

    def on_rank(rank: int, group: Any) -> bool:
        return verify(model, inputs, group, plan=OWN_PLAN).ok

    assert run_ranks(on_rank, 1) == [True]
    assert model.training
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"proj_in.weight"}
    assert torch.equal(model.proj_in.weight.grad, torch.full_like(model.proj_in.weight, 3.0))  # type: ignore[union-attr,arg-type]


class StepCache:
    """Keeps what a block was given in front of the border, and compares it with what it gets behind: lengths differ."""

    def __init__(self, model: Any) -> None:
        self.kept: torch.Tensor | None = None
        self.hooks = [
            model.proj_in.register_forward_hook(lambda module, args, out: setattr(self, "kept", out.detach())),
        ]

    def distance(self, x: torch.Tensor, streams: Any) -> float:
        assert self.kept is not None
        kept = self.kept
        if streams.is_sharded(x, "image") and not streams.is_sharded(kept, "image"):
            kept = streams.shard(kept, Shard(1, "image"))
        return float((kept - x).abs().max())


def test_a_step_cache_tells_sharded_activations_from_whole_ones() -> None:
    def on_rank(rank: int, group: Any) -> None:
        model, inputs = own_models.own()
        cache = StepCache(model)
        sharded: list[float] = []
        with parallelize(model, group, plan=OWN_PLAN) as handle:
            streams = handle.streams[0]
            block: Any = model.blocks[0]  # type: ignore[index]
            hook = block.norm.register_forward_pre_hook(
                lambda module, args: sharded.append(cache.distance(args[0], streams))
            )
            with torch.no_grad():
                out = model(**inputs)
            hook.remove()
            assert sharded == [0.0]  # behind the border stands this rank's part of what was kept
            assert not streams.is_sharded(out, "image")
            text = (
                rf"dim 1 of \[2, 9, 48\] counts neither the 13 tokens of image on all ranks nor the {7 - rank} of rank"
            )
            with pytest.raises(ValueError, match=text):
                streams.is_sharded(torch.zeros(2, 9, 48), "image")
            assert handle.sharded_lengths() == [(13, 7 - rank)]
        for hook in cache.hooks:
            hook.remove()

    run_ranks(on_rank, 2)


def test_streams_that_stand_in_a_row_are_told_apart() -> None:
    wanted = family("flux")
    models = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        with parallelize(models[rank], group) as handle:
            call_without_gradient(models[rank], wanted.inputs)
            streams = handle.streams[0]
            own = 15 - 2 * rank
            assert streams.is_sharded(torch.zeros(2, own, 48), "text", "image")
            assert streams.is_sharded(torch.zeros(2, 3, own), "text", "image", dim=-1)
            assert not streams.is_sharded(torch.zeros(2, 28, 48), "text", "image")

    run_ranks(on_rank, 2)


def test_modes_stay_as_they_were() -> None:
    """Of each module: a frozen part is often left in eval mode."""
    models = [copy.deepcopy(family("wan").model).train() for _ in range(2)]
    for model in models:
        model.get_submodule("blocks.0").eval()
    before = [module.training for module in models[0].modules()]
    run_ranks(lambda rank, group: verify(models[rank], family("wan").inputs, group), 2)
    for model in models:
        assert [module.training for module in model.modules()] == before


class TwoOutputs(torch.nn.Module):
    """The second output is no number where the model is parallelized."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4).requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.unused = Attention(query_dim=4, heads=1, dim_head=4)  # a plan is for models with attention

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.proj(x) * self.scale
        return first, torch.full_like(first, float("nan" if hasattr(self, "_ulysses_handle") else 1.0))


def test_an_output_that_is_no_number_is_found_behind_one_that_is_right() -> None:
    plan = ShardingPlan(
        inputs={"proj": {"input": Shard(1, "image")}},
        attention={"unused": "local"},
        gather={"proj": Gather(1, "image", grad="sum")},
    )
    model, x = TwoOutputs(), torch.ones(2, 6, 4)
    for result in run_ranks(lambda rank, group: verify(copy.deepcopy(model), {"x": x}, group, plan=plan), 2):
        assert result.output_error == float("inf") and not result.ok
