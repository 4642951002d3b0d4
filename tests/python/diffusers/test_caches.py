"""Step caches: the one that decides by the step gives what one process gives, the others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from same_model import assert_output, call_without_gradient, family, hooks_of
from ulysses_attention import run_ranks
from ulysses_attention.diffusers import parallelize

STEPS = (900, 700, 500, 300, 50)  # timesteps; attention may be kept between 100 and 800


def _broadcast(step: Callable[[], int]) -> Any:
    from diffusers import PyramidAttentionBroadcastConfig

    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(100, 800),
        cross_attention_block_skip_range=3, cross_attention_timestep_skip_range=(100, 800),
        current_timestep_callback=step,
    )  # fmt: skip


class Run:
    """The steps of a denoising run on one model; each step has other latents."""

    def __init__(self, name: str) -> None:
        self.wanted = family(name)
        self.model: Any = copy.deepcopy(self.wanted.model)
        self.time = 0

    def enable(self) -> None:
        self.model.enable_cache(_broadcast(lambda: self.time))

    def steps(self) -> list[torch.Tensor]:
        outs = []
        for self.time in STEPS:
            latents = self.wanted.inputs["hidden_states"] * (1 + self.time / 1000)
            outs.append(call_without_gradient(self.model, self.wanted.inputs | {"hidden_states": latents}))
        return outs


@pytest.mark.parametrize("name", ["flux", "wan", "cogvideox"])
@pytest.mark.parametrize("cache_first", [True, False])
def test_attention_kept_by_the_step(name: str, cache_first: bool) -> None:
    exact = Run(name).steps()
    alone = Run(name)
    alone.enable()
    kept = alone.steps()
    assert max(float((a - b).abs().max()) for a, b in zip(exact, kept, strict=True)) > 1e-2  # it does skip
    runs = [Run(name) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        run = runs[rank]
        if cache_first:
            run.enable()
        with parallelize(run.model, group):
            if not cache_first:
                run.enable()
            for out, wanted in zip(run.steps(), kept, strict=True):
                assert_output(out, wanted)

    run_ranks(on_rank, 2)


def _enable(model: Any, name: str) -> None:
    import diffusers

    configs: dict[str, Callable[[], Any]] = {
        "FirstBlockCacheConfig": lambda: diffusers.FirstBlockCacheConfig(threshold=0.1),
        "FasterCacheConfig": lambda: diffusers.FasterCacheConfig(current_timestep_callback=lambda: 500),
        "TaylorSeerCacheConfig": lambda: diffusers.TaylorSeerCacheConfig(),
    }
    model.enable_cache(configs[name]())


@pytest.mark.parametrize("name", ["FirstBlockCacheConfig", "FasterCacheConfig", "TaylorSeerCacheConfig"])
def test_other_caches_are_refused_before_and_after(name: str) -> None:
    models: list[Any] = [copy.deepcopy(family("flux").model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        model = models[rank]
        with parallelize(model, group):
            _enable(model, name)
            with pytest.raises(NotImplementedError, match=rf"{name}.*Fix: model\.disable_cache\(\)"):
                call_without_gradient(model, family("flux").inputs)
        with pytest.raises(NotImplementedError, match=name):
            parallelize(model, group)
        assert hooks_of(model) == 0
        model.disable_cache()
        with parallelize(model, group):
            assert_output(call_without_gradient(model, family("flux").inputs), family("flux").out)

    run_ranks(on_rank, 2)


def test_a_cache_that_was_put_on_without_enable_cache_is_refused() -> None:
    from diffusers import FirstBlockCacheConfig
    from diffusers.hooks import apply_first_block_cache

    model = copy.deepcopy(family("wan").model)
    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(NotImplementedError, match="FBCBlockHook, FBCHeadBlockHook of diffusers on WanTransformer3DM"):
        run_ranks(lambda rank, group: parallelize(model, group), 1)
    assert hooks_of(model) == 0


def test_weights_that_are_cast_layer_by_layer() -> None:
    """A hook of diffusers that does not touch tokens stays."""
    wanted = family("wan")
    models: list[Any] = [copy.deepcopy(wanted.model) for _ in range(2)]
    for model in models:
        model.enable_layerwise_casting(storage_dtype=torch.float64, compute_dtype=torch.float32)

    def on_rank(rank: int, group: Any) -> None:
        with parallelize(models[rank], group):
            assert_output(call_without_gradient(models[rank], wanted.inputs), wanted.out)

    run_ranks(on_rank, 2)
