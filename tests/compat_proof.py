"""The proof that a family comes out right over ranks: the same code for the commands of the matrix and for its test."""

from __future__ import annotations

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from families import FAMILIES, TEXT
from ulysses_attention.launch import ProcessRanks, RankError

WORLD = 2
OUTPUT_TOLERANCE = 1e-5  # of the largest output, float32
GRADIENT_TOLERANCE = 1e-4  # of a parameter's largest gradient, and no less than 1e-3 of the largest of all
SENSITIVE = 1e-2  # what attention over a rank's own tokens must move the output by, or the proof says nothing

#: One for each way of being cut; of tests/families.py.
DIFFUSERS_FAMILIES = (
    "flux", "flux2", "chroma", "wan", "wan_ti2v", "wan_i2v", "wan_vace", "qwen", "ltx", "ltx2", "hunyuan",
    "hunyuan_i2v", "z_image", "cosmos", "cogvideox", "sd3", "lumina2",
)  # fmt: skip

Cell = dict[str, Any]  # verdict: ok | wrong | insensitive | refused | absent | failed; why; what was measured


def proof_of(library: str) -> tuple[tuple[str, ...], Callable[..., Cell]]:
    """The families of a library, and prove(rank, group, family), to be run on every rank."""
    if library == "diffusers":
        return DIFFUSERS_FAMILIES, prove_diffusers
    import compat_transformers

    return tuple(compat_transformers.FAMILIES), compat_transformers.prove


def run_family(world: ProcessRanks, prove: Callable[..., Cell], family: str) -> Cell:
    """The cell of a family. What goes wrong becomes its verdict, not an exception."""
    try:
        cells = world.run(prove, family)
    except RankError as error:
        return {"verdict": "failed", "why": str(error).strip().splitlines()[-1]}
    except TimeoutError as error:
        return {"verdict": "failed", "why": f"no answer: {error}"}
    verdicts = {cell["verdict"] for cell in cells}
    if len(verdicts) > 1:
        return {"verdict": "failed", "why": f"the ranks disagree: {sorted(verdicts)}"}
    return cells[0]


def quietly(prove: Callable[..., Cell]) -> Callable[..., Cell]:
    """Without warnings, and with the same random numbers each time. The rank's settings are as before afterwards."""

    @functools.wraps(prove)
    def run(*args: Any, **kwargs: Any) -> Cell:
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                return prove(*args, **kwargs)
        finally:
            logging.disable(level)

    return run


def call(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """All outputs in one row. Lists are copied: some models change theirs."""
    given = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
    outputs = tree_leaves(model(**given, return_dict=False))
    return torch.cat([x.reshape(-1) for x in outputs if isinstance(x, torch.Tensor)])


def call_and_backward(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Under a loss that weighs every number of the output on its own."""
    model.zero_grad()
    output = call(model, inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    (output * weights).sum().backward()
    return output.detach(), gradients_of(model)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of every parameter that is trained."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained}


def largest(x: torch.Tensor) -> float:
    return float(x.abs().max())


def gradient_errors(summed: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """By parameter, as a part of its largest gradient."""
    floor = 1e-3 * max(map(largest, wanted.values()))  # below it a gradient is rounding
    assert floor > 0
    return {name: largest(summed[name] - x) / max(largest(x), floor) for name, x in wanted.items()}


def gradient_error(summed: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    return max(gradient_errors(summed, wanted).values())


def verdict(output_error: float, gradient_error: float, local_only: float) -> Cell:
    right = output_error <= OUTPUT_TOLERANCE and gradient_error <= GRADIENT_TOLERANCE
    return {
        "verdict": "wrong" if not right else "ok" if local_only > SENSITIVE else "insensitive",
        "output_error": output_error,
        "gradient_error": gradient_error,
        "local_only": local_only,
    }


def worst_of_ranks(*values: float) -> list[float]:
    worst = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


@quietly
def prove_diffusers(rank: int, group: Any, family: str) -> Cell:
    try:
        model = FAMILIES[family].model()
    except AttributeError:
        return {"verdict": "absent"}
    return prove_model(model, FAMILIES[family].inputs(TEXT, True), group)


def prove_model(model: torch.nn.Module, inputs: Mapping[str, Any], group: Any) -> Cell:
    """A model of diffusers, whole on one rank against two lines on all."""
    from ulysses_attention.diffusers import parallelize
    from ulysses_attention.diffusers.choose import plan_for

    output, gradients = call_and_backward(model, inputs)
    try:
        with parallelize(model, group) as handle:
            own, summed = call_and_backward(model, inputs)
            cut = [local < tokens for tokens, local in handle.sharded_lengths()]
    except NotImplementedError as error:
        return {"verdict": "refused", "why": str(error).splitlines()[0]}
    if not cut or not all(cut):
        return {"verdict": "failed", "why": "a rank held every token"}
    for gradient in summed.values():
        dist.all_reduce(gradient)
    blind = dataclasses.replace(plan_for(model), attention={"**": "local"})
    with torch.no_grad(), parallelize(model, group, plan=blind):
        local_only = largest(call(model, inputs) - output)
    errors = (largest(own - output) / largest(output), gradient_error(summed, gradients))
    return {"class": type(model).__name__, **verdict(*worst_of_ranks(*errors), local_only / largest(output))}
