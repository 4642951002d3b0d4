"""What parallelize puts on a model: taken off without a trace, never twice, never half, never silently replaced."""

from __future__ import annotations

import contextlib
import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel

import own_models
from same_model import (
    assert_output,
    call,
    call_without_gradient,
    family,
    hooks_of,
    on_rank,
    one_process,
    over_threads,
    processors_of,
    rebound_modules,
)
from ulysses_attention import run_ranks
from ulysses_attention.diffusers import Attend, Gather, Shard, ShardingPlan, parallelize

with contextlib.suppress(ImportError):
    from diffusers.models.attention_dispatch import dispatch_attention_fn


def _alone(fn: Callable[[Any], Any]) -> Any:
    """fn(group) on a group of one rank."""
    return run_ranks(lambda rank, group: fn(group), 1)[0]


def _model(name: str) -> Any:
    return copy.deepcopy(family(name).model)


def test_remove_restores_processors_hooks_and_modules() -> None:
    model = _model("wan")
    before, names = processors_of(model), set(vars(model))

    def check(group: Any) -> None:
        handle = parallelize(model, group)
        assert not set(map(id, before.values())) & set(map(id, processors_of(model).values()))
        assert hooks_of(model) > 0 and rebound_modules()
        for path, processor in processors_of(model).items():
            assert isinstance(processor, type(before[path]))
            assert type(processor).__module__ == type(before[path]).__module__
        handle.remove()
        handle.remove()

    _alone(check)
    assert processors_of(model) == before and set(vars(model)) == names
    assert hooks_of(model) == 0 and not rebound_modules()


def test_the_context_removes_when_the_body_fails() -> None:
    model = _model("wan")

    def check(group: Any) -> None:
        with pytest.raises(ZeroDivisionError), parallelize(model, group):
            raise ZeroDivisionError

    _alone(check)
    assert hooks_of(model) == 0 and not rebound_modules()


def test_a_forward_that_fails_leaves_the_model_usable() -> None:
    wanted = family("flux")
    models = [_model("flux") for _ in range(2)]

    def check(rank: int, group: Any) -> None:
        with parallelize(models[rank], group):
            with pytest.raises(ValueError, match=r"with 22 tokens.*'image', which has 21. Fix: another dim or"):
                call(models[rank], wanted.inputs | {"img_ids": torch.zeros(22, 3)})
            assert_output(call_without_gradient(models[rank], wanted.inputs), wanted.out)

    run_ranks(check, 2)


MOCHI: dict[str, tuple[dict[str, Any], str]] = {
    "named": (
        {"**.attn1": Attend(("image",))},
        r"'\*\*\.attn1', but .*\(transformer_blocks\.0\.attn1 is a MochiAtt.*Fix",
    ),
    "named, may be missing": (
        {"**.attn1?": Attend(("image",))},
        "'transformer_blocks.0.attn1' is a MochiAttention, wh",
    ),
    "not named": ({}, "'transformer_blocks.0.attn1' is a MochiAttention, which has a processor that cannot be set"),
    "local": ({"**.attn1": "local"}, "MochiTransformer3DModel has no attention with a processor that can be set, so"),
}


@pytest.mark.parametrize("name", MOCHI)
def test_attention_whose_processor_cannot_be_set_is_refused(name: str) -> None:
    attention, text = MOCHI[name]
    model = own_models.mochi()
    plan = ShardingPlan(attention=attention, gather={"proj_out": Gather(1, "image")})

    def check(group: Any) -> None:
        with pytest.raises(ValueError, match=text):
            parallelize(model, group, plan=plan)

    _alone(check)
    assert hooks_of(model) == 0 and not hasattr(model, "_ulysses_handle")


def test_attention_without_a_processor_is_refused_where_the_plan_names_it() -> None:
    model, _ = own_models.with_bare_attention()
    before = processors_of(model)
    attention: dict[str, Any] = {"blocks.1.attn1": Attend(("image",)), "**": "local"}
    plan = ShardingPlan(attention=attention, gather={"proj_out": Gather(1, "image")})

    def check(group: Any) -> None:
        with pytest.raises(ValueError, match=r"'blocks\.1\.attn1'.*\(blocks\.1\.attn1 is a BareAttention\)"):
            parallelize(model, group, plan=plan)

    _alone(check)
    assert hooks_of(model) == 0 and processors_of(model) == before


def test_names_that_an_earlier_one_took_or_that_may_be_missing_are_accepted() -> None:
    attention: dict[str, Any] = {"**": Attend(("image",)), "**.attn2": "local", "**.attn3?": "local"}
    plan = ShardingPlan(attention=attention, gather={"proj_out": Gather(1, "image")})
    _alone(lambda group: parallelize(_model("wan"), group, plan=plan).remove())


def test_sd3_without_a_second_attention_is_accepted() -> None:
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16, pooled_projection_dim=8,
    )  # fmt: skip
    assert not any(path.endswith("attn2") for path in processors_of(model))
    _alone(lambda group: parallelize(model, group).remove())


IMAGE = Shard(1, "image")
NO_MODULE = r"which WanTransformer3DModel does not have. Fix: one of its modules .*proj_out"
BAD_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "module": ({"gather": {"proj_ouT": Gather(1, "image")}}, f"module 'proj_ouT', {NO_MODULE}"),
    "no list": ({"gather": {"proj_out.-1": Gather(1, "image")}}, f"module 'proj_out.-1', {NO_MODULE}"),
    "nothing": ({"gather": {"blockz.-1": Gather(1, "image")}}, f"module 'blockz.-1', {NO_MODULE}"),
    "argument": ({"inputs": {"blocks.0": {"x": IMAGE}}}, r"argument 'x' of 'blocks.0'.*Fix: one of hidden_s.*'x\?'"),
    "root": ({"inputs": {"": {"x": IMAGE}}}, r"argument 'x' of 'the model'.*Fix: one of hidden_states"),
    "attention": ({"attention": {"**.attn1": Attend(("image",))}}, r"'blocks\.0\.attn2' attends to.*Fix: attention={"),
    "slip": (
        {"attention": {"**.attn3": "local", "**": Attend(("image",))}},
        r"attention '\*\*\.attn3', but no module there has a processor that can be set \(none has that name\), "
        r"so it would see the tokens of its own rank only\. Fix: one of the attentions that can be set "
        r"\(\*\*\.attn1, \*\*\.attn2\), or '\*\*\.attn3\?' if",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_that_does_not_fit_leaves_nothing_behind(name: str) -> None:
    changes, text = BAD_PLANS[name]
    model = _model("wan")
    before = processors_of(model)
    fields: dict[str, Any] = {"attention": {"**": Attend(("image",))}, "gather": {"proj_out": Gather(1, "image")}}
    plan = ShardingPlan(**(fields | changes))

    def check(group: Any) -> None:
        with pytest.raises(ValueError, match=text):
            parallelize(model, group, plan=plan)

    _alone(check)
    assert processors_of(model) == before and hooks_of(model) == 0 and not rebound_modules()


def test_a_second_model_that_fails_restores_the_first() -> None:
    pipeline = types.SimpleNamespace(transformer=_model("wan"), transformer_2=torch.nn.Linear(1, 1))

    def check(group: Any) -> None:
        with pytest.raises(NotImplementedError, match="no plan is known for Linear"):
            parallelize(pipeline, group)

    _alone(check)
    assert hooks_of(pipeline.transformer) == 0 and not rebound_modules()


def test_both_transformers_of_a_pipeline() -> None:
    pipeline = types.SimpleNamespace(transformer=_model("wan"), transformer_2=_model("wan_ti2v"))

    def check(group: Any) -> None:
        with parallelize(pipeline, group) as handle:
            assert len(handle.plans) == 2
            for model, name in ((pipeline.transformer, "wan"), (pipeline.transformer_2, "wan_ti2v")):
                assert_output(call_without_gradient(model, family(name).inputs), family(name).out)
        with pytest.raises(NotImplementedError, match=r"no model and has no transformer.*Fix: pass a transformer"):
            parallelize(types.SimpleNamespace(unet=1), group)

    _alone(check)


def test_twice_is_refused_and_keeps_the_first() -> None:
    wanted, model = family("wan"), _model("wan")

    def check(group: Any) -> None:
        with parallelize(model, group):
            with pytest.raises(ValueError, match=r"parallelized already. Fix: remove\(\)"):
                parallelize(model, group)
            assert_output(call_without_gradient(model, wanted.inputs), wanted.out)

    _alone(check)


def test_again_after_remove() -> None:
    wanted = family("flux")
    models = [_model("flux") for _ in range(2)]
    for _ in range(2):
        run_ranks(lambda rank, group: on_rank(group, models[rank], wanted, {}), 2)


def _enabled(model: Any) -> None:
    """What enable_parallelism leaves; it asks for an accelerator by itself."""
    from diffusers import ContextParallelConfig

    model._parallel_config = ContextParallelConfig(ulysses_degree=2)


def _only_hooks(model: Any) -> None:
    from diffusers.hooks import apply_context_parallel

    config = types.SimpleNamespace(_mesh=None, _flattened_mesh=None, ulysses_anything=False, ring_anything=False)
    apply_context_parallel(model, config, model._cp_plan)


@pytest.mark.parametrize("enable", [_enabled, _only_hooks])
@pytest.mark.parametrize("ours_first", [True, False])
def test_diffusers_own_context_parallelism_is_refused(enable: Callable[[Any], None], ours_first: bool) -> None:
    model = _model("wan")

    def check(group: Any) -> None:
        with contextlib.ExitStack() as stack:
            if ours_first:
                stack.enter_context(parallelize(model, group))
            enable(model)
            with pytest.raises(
                ValueError, match=r"would be cut twice. Fix: a model on which enable_parallelism was no"
            ):
                call_without_gradient(model, family("wan").inputs) if ours_first else parallelize(model, group)
        assert hooks_of(model) == 0

    _alone(check)


@pytest.mark.parametrize(
    ("of", "part"),
    [
        (copy.deepcopy, ""),
        (copy.deepcopy, "blocks.0"),
        (copy.deepcopy, "blocks.0.attn1"),
        (pickle.dumps, ""),
        (pickle.dumps, "blocks.0.attn1"),
    ],
)
def test_a_copy_of_a_parallelized_model_is_refused(of: Callable[[Any], Any], part: str) -> None:
    model = _model("wan")

    def check(group: Any) -> None:
        with parallelize(model, group), pytest.raises(TypeError, match=r"Fix: handle\.remove\(\) first, then copy"):
            of(model.get_submodule(part).processor if part.endswith("attn1") else model.get_submodule(part))

    _alone(check)
    copied = copy.deepcopy(model)
    assert torch.equal(call_without_gradient(copied, family("wan").inputs), family("wan").out)


def test_state_dict_has_the_names_of_the_model() -> None:
    model = _model("wan")
    names = list(model.state_dict())

    def check(group: Any) -> None:
        with parallelize(model, group):
            assert list(model.state_dict()) == names

    _alone(check)


def _fuse(model: Any) -> None:
    model.fuse_qkv_projections()


def _set_all(model: Any) -> None:
    model.set_attn_processor({f"{path}.processor": p for path, p in processors_of(family("flux").model).items()})


def _load_ip_adapter(model: Any) -> None:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    attention = model.transformer_blocks[1].attn
    attention.set_processor(FluxIPAdapterAttnProcessor(hidden_size=48, cross_attention_dim=8))


LATER = [("cogvideox", _fuse), ("flux", _set_all), ("flux", _load_ip_adapter)]


@pytest.mark.parametrize(("name", "change"), LATER)
def test_processors_set_afterwards_are_refused(name: str, change: Callable[[Any], None]) -> None:
    models = [_model(name) for _ in range(2)]

    def check(rank: int, group: Any) -> str:
        with parallelize(models[rank], group):
            change(models[rank])
            now = processors_of(models[rank])
            with pytest.raises(RuntimeError) as raised:
                call_without_gradient(models[rank], family(name).inputs)
        after = processors_of(models[rank])
        kept = [path for path, processor in now.items() if not type(processor).__name__.startswith("Ulysses")]
        assert kept and all(after[path] is now[path] for path in kept)  # what was set is left alone
        assert not any(type(processor).__name__.startswith("Ulysses") for processor in after.values())
        return str(raised.value)

    for text in run_ranks(check, 2):
        assert "was set after parallelize and sees the tokens of this rank only. Fix: handle.remove() first" in text


def test_a_processor_that_comes_back_after_remove_is_refused() -> None:
    """unfuse_qkv_projections sets those that fusing found, which were ours."""
    model = _model("cogvideox")

    def check(group: Any) -> None:
        with parallelize(model, group):
            model.fuse_qkv_projections()
        model.unfuse_qkv_projections()
        with pytest.raises(RuntimeError, match=r"set again after handle.remove\(\).*Fix: set_attn_processor"):
            call_without_gradient(model, family("cogvideox").inputs)

    _alone(check)


def test_an_ip_adapter_is_refused() -> None:
    model = _model("flux")
    _load_ip_adapter(model)

    def check(group: Any) -> None:
        with pytest.raises(NotImplementedError, match=r"has weights of its own \(an IP adapter\)"):
            parallelize(model, group)

    _alone(check)
    assert hooks_of(model) == 0 and not rebound_modules()


def test_fused_before() -> None:
    """One projection for queries, keys and values, by diffusers' own fused processor."""
    model = _model("cogvideox")
    model.fuse_qkv_projections()
    wanted = one_process(model, family("cogvideox").inputs)
    assert all("Fused" in type(processor).__name__ for processor in processors_of(model).values())
    over_threads(wanted, 2)


class Tuned:
    """A processor that holds a tensor and keeps what it saw."""

    def __init__(self, factor: float) -> None:
        self.factor = torch.tensor([factor, factor])
        self.seen: list[int] = []

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append(hidden_states.size(1))
        q, k, v = (f(hidden_states).unflatten(-1, (3, 16)) for f in (attn.to_q, attn.to_k, attn.to_v))
        return dispatch_attention_fn(q * self.factor[0], k, v).flatten(2)


def test_a_processor_of_the_callers_own_keeps_its_state_and_is_restored() -> None:
    """Two that hold tensors and lists are two over ranks as well."""
    model = _model("wan")
    for factor, block in enumerate(model.blocks, start=1):
        block.attn1.set_processor(Tuned(factor))
    wanted = one_process(model, family("wan").inputs)
    seen = [block.attn1.processor.seen for block in model.blocks]
    assert seen == [[27], [27]]
    models = [copy.deepcopy(model) for _ in range(2)]
    run_ranks(lambda rank, group: on_rank(group, models[rank], wanted, {}), 2)
    # By on_rank: alone, local only, over ranks, and restored.
    for rank, tokens in enumerate((14, 13)):
        for block in models[rank].blocks:
            assert block.attn1.processor.seen == [27, 27, tokens, tokens, 27]
