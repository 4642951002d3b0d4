"""Attention of well-known libraries as targets of the doctor: `peer:NAME` or `peer:NAME/VARIANT`.

One module per library, each with
    DISTRIBUTION, the name under which pip installs it;
    VARIANTS, {variant: setup}, the first is the default. setup() is called once per rank process, after
    torch.distributed is initialised with the world as the group; it imports the library and returns the function
    fn(q, k, v, group, *, options). The options in its signature are those that the library's own call can express.
Importing this package imports none of the libraries.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["distribution", "load", "targets", "versions"]

Attention = Callable[..., Any]
Setup = Callable[[], Attention]

_MODULES = {
    "diffusers": "diffusers",
    "yunchang": "yunchang",
    "deepspeed": "deepspeed",
    "para-attn": "para_attn",
    "cache-dit": "cache_dit",
    "torch": "torch_cp",
}


def load(target: str) -> Setup:
    """The setup function of "NAME" or "NAME/VARIANT", with or without "peer:" in front.

    Errors: ValueError for an unknown name or variant, with the known ones; ModuleNotFoundError if the library is not
    installed.
    """
    name, _, variant = target.removeprefix("peer:").partition("/")
    if name not in _MODULES:
        known = ", ".join(f"peer:{peer}" for peer in _MODULES)
        raise ValueError(f"[doctor] target='peer:{name}' is no known library. Known: {known}. Fix: one of these.")
    variants: dict[str, Setup] = _module(name).VARIANTS
    if variant and variant not in variants:
        known = ", ".join(f"peer:{name}/{each}" for each in variants)
        raise ValueError(
            f"[doctor] target='peer:{name}/{variant}' is no known variant of {name}. Known: {known}. Fix: one of these."
        )
    if _version(distribution(name)) is None:
        raise ModuleNotFoundError(
            f"[doctor] target='peer:{name}' needs {distribution(name)}, which is not installed. "
            f"Fix: pip install {distribution(name)}, or scripts/install_peers.sh for all of them."
        )
    return variants[variant or next(iter(variants))]


def targets() -> list[str]:
    """Every target that load() knows, variants spelled out: ["peer:diffusers/native", ...]."""
    return [f"peer:{name}/{variant}" for name in _MODULES for variant in _module(name).VARIANTS]


def distribution(name: str) -> str:
    """The name under which pip installs a library."""
    return str(_module(name).DISTRIBUTION)


def versions() -> dict[str, str | None]:
    """The installed version of each library by distribution name, None where it is not installed."""
    return {distribution(name): _version(distribution(name)) for name in _MODULES}


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{_MODULES[name]}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
