"""Some families over processes that talk by Gloo: the same proof as on threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from same_model import on_process
from ulysses_attention.launch import ProcessRanks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flux", {}),
        ("wan_ti2v", {"strategy": "allgather_kv"}),
        ("qwen", {"kernel": "math"}),
        ("z_image", {}),
        ("hunyuan_i2v", {"strategy": "allgather_kv", "kernel": "math"}),
        ("ltx2", {}),
    ],
)
def test_same_model_on_processes(gloo: Callable[[int], ProcessRanks], name: str, options: dict[str, Any]) -> None:
    gloo(2).run(on_process, name, options)
