"""The gate runs over registered backends, so a scan finds every subclass that is not registered."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ulysses_attention
from ulysses_attention import UlyssesAttentionProcessor, backends, unregister_backend
from ulysses_attention.diffusers import UlyssesAttnProcessor
from ulysses_attention.processor import CallableProcessor

# The kernel= of one call, and what stands in a model of diffusers: made for a call or a model, not chosen by name.
INTERNAL = frozenset({CallableProcessor, UlyssesAttnProcessor})


def unregistered_backends(
    base: type, homes: Iterable[str], registered: Iterable[Any], exempt: frozenset[type] = frozenset()
) -> list[str]:
    """Subclasses of base, at any depth, that a module below one of `homes` defines and nothing registers."""
    classes = {type(backend) for backend in registered} | exempt

    def below(parent: type) -> Iterator[type]:
        for child in parent.__subclasses__():
            yield child
            yield from below(child)

    return sorted(
        f"{found.__module__}.{found.__qualname__}"
        for found in set(below(base))
        if any(found.__module__ == home or found.__module__.startswith(home + ".") for home in homes)
        and found not in classes
    )


def _import_everything() -> list[str]:
    """Import every module of the package and every example; their names."""
    found = pkgutil.walk_packages(ulysses_attention.__path__, "ulysses_attention.")
    names = [info.name for info in found if not info.name.endswith(("._C", ".libulysses", ".__main__"))]
    for name in names:
        importlib.import_module(name)
    examples = Path(__file__).resolve().parents[2] / "examples"
    for path in sorted(examples.glob("*.py")):
        name = f"examples_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        names.append(name)
    return ["ulysses_attention", *names]


def test_every_subclass_in_package_and_examples_is_registered() -> None:
    before = set(backends())
    homes = _import_everything()  # examples register their backends
    registered = backends()
    for name in set(registered) - before:
        unregister_backend(name)
    internal = INTERNAL | {UlyssesAttentionProcessor}
    root = ulysses_attention._C.UlyssesAttentionProcessor
    assert unregistered_backends(root, homes, registered.values(), internal) == []
    assert {"examples_diffusers_flux", "ulysses_attention.processor"} <= set(homes)


def test_the_scan_finds_a_planted_subclass_at_any_depth() -> None:
    class Planted(UlyssesAttentionProcessor):
        pass

    Planted.__module__ = "ulysses_attention.planted"
    scan = lambda *registered: unregistered_backends(UlyssesAttentionProcessor, ["ulysses_attention"], registered,  # noqa: E731
                                                     INTERNAL)  # fmt: skip
    assert [name.rsplit(".", 1)[1] for name in scan()] == ["Planted"]
    assert scan(Planted()) == []


@pytest.mark.parametrize("supports", ["is_causal", {"is_casual"}, ["need_lse", "window"]])
def test_cp050_supports_must_name_fields_of_the_call(supports: Any) -> None:
    fields = "is_causal, softmax_scale, q_positions, need_lse, attn_mask, sinks, softcap"
    with pytest.raises(ValueError, match=rf"Fix: a set of {fields}\. \[CP050\]"):
        type("Misspelt", (UlyssesAttentionProcessor,), {"supports": supports})
