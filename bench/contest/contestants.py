"""Who is measured. Each of the libraries through its own public call, by the adapters that the doctor has for them."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from contest import recipes
from ulysses_attention import ulysses_attention
from ulysses_attention.doctor import peers

__all__ = ["CONTESTANTS", "CONTROL", "KERNEL", "STAND_INS", "Contestant", "versions"]

Attention = Callable[..., torch.Tensor]  # (q, k, v, group, *, is_causal=)

KERNEL = "torch's bare kernel"


class Contestant(NamedTuple):
    """setup() runs once in each rank process, after torch.distributed is initialised, and returns the call."""

    name: str
    setup: Callable[[], Attention]
    is_ours: bool = False  # takes layout= where shards differ
    only_uneven: bool = False


def _ours(strategy: str, kernel: str) -> Attention:
    return functools.partial(ulysses_attention, strategy=strategy, kernel=kernel)


def _recipe(name: str) -> Attention:
    return getattr(recipes, name)


def _peer(target: str) -> Attention:
    return peers.load(target)()


def _ringmaster() -> Attention:
    """Its attention of the registry of transformers, with that library's sdpa inside."""
    import ringmaster
    import ringmaster.runtime
    import torch.distributed as dist
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = ringmaster.RingmasterConfig(size=dist.get_world_size(), backend="ulysses")
    runtime = ringmaster.setup(config, num_kv_heads=None, device_type="cpu", inner_attn="sdpa")
    registered = ALL_ATTENTION_FUNCTIONS[runtime.attn_implementation]
    module = torch.nn.Module()  # what the call reads of a model's attention layer

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, *, is_causal: bool = False
    ) -> torch.Tensor:
        module.is_causal, module.num_key_value_groups = is_causal, q.size(2) // k.size(2)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return registered(module, *heads_first, None, is_causal=is_causal)[0]

    return attention


def _peer_contestant(name: str, target: str, only_uneven: bool = False) -> Contestant:
    return Contestant(name, functools.partial(_peer, target), only_uneven=only_uneven)


#: The control is this one twice: every machine runs it, for every cell.
CONTROL = Contestant("ours: ulysses, cpu_fused", functools.partial(_ours, "ulysses", "cpu_fused"), is_ours=True)

CONTESTANTS = [
    Contestant("ours: ulysses, cpu_flash", functools.partial(_ours, "ulysses", "cpu_flash"), is_ours=True),
    CONTROL,
    Contestant("ours: allgather_kv, cpu_flash", functools.partial(_ours, "allgather_kv", "cpu_flash"), is_ours=True),
    Contestant("ours: allgather_kv, cpu_fused", functools.partial(_ours, "allgather_kv", "cpu_fused"), is_ours=True),
    Contestant("recipe: four all-to-alls", functools.partial(_recipe, "four_all_to_alls")),
    Contestant("recipe: two all-to-alls", functools.partial(_recipe, "two_all_to_alls")),
    Contestant("recipe: all-gather of K/V", functools.partial(_recipe, "gather_keys")),
    _peer_contestant("diffusers", "peer:diffusers/native"),
    _peer_contestant("diffusers, ulysses_anything", "peer:diffusers/anything", only_uneven=True),
    _peer_contestant("cache-dit", "peer:cache-dit/native"),
    _peer_contestant("cache-dit, ulysses_anything", "peer:cache-dit/anything", only_uneven=True),
    _peer_contestant("yunchang", "peer:yunchang/ulysses"),
    _peer_contestant("para-attn", "peer:para-attn/ulysses"),
    _peer_contestant("DeepSpeed", "peer:deepspeed/ulysses"),
    Contestant("ringmaster", _ringmaster),
]

#: What stands where a library has CUDA code only, or leaves the choice to its user.
STAND_INS = {
    "yunchang": "its exchange with torch's scaled_dot_product_attention; its own kernels need CUDA",
    "DeepSpeed": "the local attention is its user's by design: torch's scaled_dot_product_attention",
    "ringmaster": "sends q, k, v and out by all-gather over Gloo, as it does on every CPU",
    "cache-dit": "the dispatcher under its processors; a plain call has no public name there",
}


def versions() -> dict[str, str | None]:
    """Of every library by distribution; None where it is not installed."""
    found = {name: version for name, version in peers.versions().items() if name != "torch"}
    try:
        found["axolotl-ringmaster"] = importlib.metadata.version("axolotl-ringmaster")
    except importlib.metadata.PackageNotFoundError:
        found["axolotl-ringmaster"] = None
    return found
