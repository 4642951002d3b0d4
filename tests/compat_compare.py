"""diffusers' own context parallelism beside ours, on the same tiny models: what each does, in processes of its own.

Usage: python compat_compare.py FOLDER
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from compat_proof import (
    DIFFUSERS_FAMILIES,
    OUTPUT_TOLERANCE,
    Cell,
    call,
    call_and_backward,
    gradient_error,
    largest,
    prove_model,
    quietly,
    run_family,
    verdict,
    worst_of_ranks,
)
from families import FAMILIES, TEXT, Family, grid, noise
from ulysses_attention.launch import ProcessRanks

Inputs = dict[str, Any]

TIMEOUT_S = 30.0
COLUMNS = ("diffusers", "diffusers, ulysses_anything", "ours")


class Case(NamedTuple):
    """A family with another size: config is changed, inputs replace those of the family."""

    family: str
    what: str
    world: int = 2
    config: dict[str, Any] = {}  # noqa: RUF012  (read only)
    inputs: Callable[[], Inputs] = dict

    def build(self) -> tuple[torch.nn.Module, Inputs]:
        family = FAMILIES[self.family]
        model = Family(family.kind, {**family.config, **self.config}, family.inputs).model()
        return model, family.inputs(TEXT, True) | self.inputs()


def _tokens(image: int, text: int) -> Inputs:
    inputs = {"hidden_states": noise(2, image, 4), "encoder_hidden_states": noise(2, text, 8, seed=1)}
    return inputs | {"img_ids": grid(image), "txt_ids": torch.zeros(text, 3)}


def _tokens_of_flux2(image: int, text: int) -> Inputs:
    inputs = _tokens(image, text)
    for name in ("img_ids", "txt_ids"):
        inputs[name] = torch.nn.functional.pad(inputs[name], (1, 0))[None].expand(2, -1, -1)
    return inputs


def _even_video() -> Inputs:
    return {"hidden_states": noise(2, 4, 4, 8, 4)}  # 32 tokens


def _even_qwen() -> Inputs:
    inputs = {"hidden_states": noise(2, 16, 16), "img_shapes": [[(1, 4, 4)]] * 2}
    return inputs | {"encoder_hidden_states": noise(2, 4, 8, seed=1), "encoder_hidden_states_mask": None}


def _even_ltx() -> Inputs:
    inputs = {"hidden_states": noise(2, 32, 4), "num_frames": 2, "height": 4, "width": 4}
    inputs |= {"timestep": torch.tensor([[500.0], [700.0]]), "encoder_hidden_states": noise(2, 4, 8, seed=1)}
    return inputs | {"encoder_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()}


def _even_ltx2() -> Inputs:
    inputs = _even_ltx() | {"audio_hidden_states": noise(2, 4, 4, seed=3), "audio_num_frames": 4}
    return inputs | {"audio_encoder_hidden_states": noise(2, 4, 8, seed=2), "encoder_attention_mask": None}


FOUR = {"num_attention_heads": 4}
FOUR_LTX = FOUR | {"cross_attention_dim": 64}
FOUR_LTX2 = FOUR_LTX | {"audio_num_attention_heads": 4, "audio_cross_attention_dim": 32}
UNEVEN = "lengths and heads that do not divide by 2"
CASES = [
    Case("flux", "24 + 8 tokens, 4 heads", 2, FOUR, functools.partial(_tokens, 24, 8)),
    Case("flux2", "24 + 8 tokens, 4 heads", 2, FOUR, functools.partial(_tokens_of_flux2, 24, 8)),
    Case("wan", "32 tokens, 4 heads", 2, FOUR, _even_video),
    Case("qwen", "16 + 4 tokens, 4 heads", 2, FOUR, _even_qwen),
    Case("ltx", "32 + 4 tokens, 4 heads, a text mask", 2, FOUR_LTX, _even_ltx),
    Case("ltx2", "32 tokens, 4 of audio, 4 heads", 2, FOUR_LTX2, _even_ltx2),
    Case("flux", "24 + 8 tokens, 3 heads", 2, {}, functools.partial(_tokens, 24, 8)),
    Case("flux", "24 + 7 tokens, 4 heads", 2, FOUR, functools.partial(_tokens, 24, 7)),
    Case(
        "flux", "24 + 8 tokens, 30 heads on 4 ranks", 4, {"num_attention_heads": 30}, functools.partial(_tokens, 24, 8)
    ),
    *(Case(family, "4 query heads to 2 of keys" if family == "lumina2" else UNEVEN) for family in DIFFUSERS_FAMILIES),
]


@quietly
def ours(rank: int, group: Any, place: int) -> Cell:
    model, inputs = CASES[place].build()
    return prove_model(model, inputs, group)


@quietly
def theirs(rank: int, group: Any, place: int, anything: bool) -> Cell:
    """diffusers' own. Its gradients count as right if their sum over the ranks is, or their mean."""
    from diffusers import ContextParallelConfig

    model, inputs = CASES[place].build()
    output, gradients = call_and_backward(model, inputs)
    size = group.size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(ulysses_degree=size, ulysses_anything=anything, mesh=mesh)
    try:
        with mock.patch("torch.accelerator.device_count", return_value=1):  # 0 without a GPU, by which it divides
            model.enable_parallelism(config=config)  # type: ignore[operator]
    except (ValueError, NotImplementedError) as error:
        return {"verdict": "refused", "why": str(error)}
    with torch.no_grad():
        own = call(model, inputs)
    if own.shape != output.shape:
        return {"verdict": "wrong", "why": f"an output of {own.numel()} numbers, not {output.numel()}"}
    error_of_output = worst_of_ranks(largest(own - output) / largest(output))[0]
    try:
        _, summed = call_and_backward(model, inputs)
    except NotImplementedError as error:
        right = error_of_output <= OUTPUT_TOLERANCE
        return {"verdict": "forward only" if right else "wrong", "why": str(error), "output_error": error_of_output}
    for gradient in summed.values():
        dist.all_reduce(gradient)
    mean = {name: x / size for name, x in summed.items()}
    wrong = min(gradient_error(summed, gradients), gradient_error(mean, gradients))
    return verdict(error_of_output, worst_of_ranks(wrong)[0], local_only=1.0)


def run_case(world: ProcessRanks, place: int, column: str) -> Cell:
    """What fails takes its processes with it; the next case gets new ones."""
    prove = ours if column == "ours" else functools.partial(theirs, anything="anything" in column)
    return run_family(world, prove, place)


def main(folder: str) -> int:
    rows = []
    worlds = {size: ProcessRanks(size, timeout_s=TIMEOUT_S) for size in {case.world for case in CASES}}
    for place, case in enumerate(CASES):
        cells = {column: run_case(worlds[case.world], place, column) for column in COLUMNS}
        rows.append({"family": case.family, "what": case.what, "cells": cells})
        print(case.family, case.what, {name: (cell["verdict"], cell.get("why", "")) for name, cell in cells.items()})
    for world in worlds.values():
        world.close()
    result = {
        "version": importlib.metadata.version("diffusers"),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    file = pathlib.Path(folder) / "compare-diffusers.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["cells"]["ours"]["verdict"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
