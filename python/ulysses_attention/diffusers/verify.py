"""Is a parallelized model still the same model: output and gradients against one process, on the caller's inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from ulysses_attention._request import resolve_group
from ulysses_attention.check import check_same
from ulysses_attention.diffusers.parallel import Handle, parallelize

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Verification", "verify"]

SHOWN = 10  # wrong gradients in the text
NONE_SEEN = (
    "No tensor of full length was seen in the modules' arguments. Look at: which dim each Shard cuts, what the failing "
    'attention attends to ("local" for text that every rank holds), and whether the last Linear is in gather.'
)
Shapes = dict[tuple[str, str], tuple[int, ...]]  # (module, argument or a place in it) -> shape of a tensor


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` measured, the same on every rank.

    output_error:    the largest difference of the outputs, in units of the largest output.
    gradient_errors: parameter -> the largest difference of its gradient, in units of its largest gradient.
    tolerance:       what they may be.
    left_whole:      tensors as long as a sharded stream that meet sharded ones, as "module: argument [shape]".
    """

    output_error: float
    gradient_errors: Mapping[str, float]
    tolerance: float
    left_whole: tuple[str, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The parameters whose gradients are wrong."""
        return tuple(name for name, error in self.gradient_errors.items() if not error <= self.tolerance)

    @property
    def ok(self) -> bool:
        return self.output_error <= self.tolerance and not self.wrong

    def __str__(self) -> str:
        worst = max(self.gradient_errors.values(), default=0.0)
        lines = [
            f"output: {self.output_error:.1e} of the largest, gradients: {worst:.1e} "
            f"(each may be {self.tolerance:.0e}): {'the same model' if self.ok else 'NOT the same model'}"
        ]
        lines += [f"wrong gradient: {name} {self.gradient_errors[name]:.1e}" for name in self.wrong[:SHOWN]]
        lines += [f"and {len(self.wrong) - SHOWN} more"] if len(self.wrong) > SHOWN else []
        lines += [f"left whole beside sharded tensors: {tensor}" for tensor in self.left_whole]
        return "\n".join(lines)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.1)


@contextlib.contextmanager
def _shapes_of_inputs(model: torch.nn.Module) -> Iterator[Shapes]:
    """The shapes of the tensors that each module is given, the model itself under ""."""
    shapes: Shapes = {}
    hooks = []
    for path, module in model.named_modules():
        names = list(inspect.signature(module.forward).parameters)

        def note(_: Any, args: Any, kwargs: Any, path: str = path, names: list[str] = names) -> None:
            for name, value in [*zip(names, args), *kwargs.items()]:  # noqa: B905
                for inside, x in tree_flatten_with_path(value)[0]:  # also in tuples, lists and dictionaries
                    if isinstance(x, torch.Tensor):
                        shapes[path, name + keystr(inside)] = tuple(x.shape)

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield shapes
    finally:
        for hook in hooks:
            hook.remove()


def _left_whole(before: Shapes, after: Shapes, handle: Handle) -> tuple[str, ...]:
    lengths = {n for n, own in handle.sharded_lengths() if own != n}
    cut = {path for (path, name), shape in after.items() if shape != before.get((path, name), shape)}

    def counts_tokens(shape: tuple[int, ...]) -> bool:
        return not lengths.isdisjoint(shape if len(shape) < 3 else shape[1:])

    return tuple(
        f"{path or 'the model'}: {name} {list(shape)}"
        for (path, name), shape in after.items()
        if path in cut and shape == before.get((path, name)) and counts_tokens(shape)
    )


def _run(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, and gradients by parameter, under a loss that weighs every output on its own."""
    model.zero_grad()
    given = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
    with torch.enable_grad():
        outputs = [x for x in tree_leaves(model(**given)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        weights = torch.Generator().manual_seed(1)
        loss = sum((x * torch.randn(x.shape, generator=weights).to(x)).sum() for x in outputs)
        torch.autograd.backward(loss)  # type: ignore[arg-type]
    named = model.named_parameters()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named if p.requires_grad
    }
    return [x.detach() for x in outputs], gradients


def _difference(x: torch.Tensor, wanted: torch.Tensor, scale: float) -> float:
    if x.shape != wanted.shape:
        return float("inf")
    return float((x - wanted).abs().max()) / max(scale, 1e-30) if x.numel() else 0.0


def _largest(tensors: list[torch.Tensor]) -> float:
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)


def verify(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    group_or_mesh: ProcessGroup | DeviceMesh | None = None,
    **options: Any,
) -> Verification:
    """Compares a model over the ranks of a group with itself on one: output and every parameter's gradient.

    Every rank calls it with the same model and inputs; each runs the whole model once, so it must fit. Use float32 or
    float64 and a model without zero-initialised gates. Gradients that the parameters hold are kept.

    inputs:  the arguments of the model's forward.
    options: of `parallelize`: plan, policy, strategy, kernel.
    Comm:    that of two passes, a fingerprint of inputs and parameters, and one sum for each parameter's gradient.
    Errors:  RuntimeError (CP068) that names inputs and parameters which differ between the ranks, or with the
             tensors that were left whole if the parallelized forward fails.
    """
    group, _ = resolve_group(group_or_mesh)
    flat, _ = tree_flatten_with_path(dict(inputs))
    named = {"inputs" + "".join(str(key) for key in path): x for path, x in flat if isinstance(x, torch.Tensor)}
    check_same(named | {name: p.detach() for name, p in model.named_parameters()}, group)
    training = {module: module.training for module in model.modules()}
    kept = {p: p.grad for p in model.parameters()}
    model.eval()
    try:
        return _compare(model, inputs, group, options)
    finally:
        for module, mode in training.items():
            module.training = mode
        for p, gradient in kept.items():
            p.grad = gradient


def _compare(
    model: torch.nn.Module, inputs: Mapping[str, Any], group: ProcessGroup, options: Mapping[str, Any]
) -> Verification:
    with _shapes_of_inputs(model) as before:
        outputs, gradients = _run(model, inputs)
    with parallelize(model, group, **options) as handle, _shapes_of_inputs(model) as after:
        try:
            own_outputs, own_gradients = _run(model, inputs)
        except Exception as error:
            whole = ", ".join(_left_whole(before, after, handle))
            advice = f"Tensors of full length beside sharded ones: {whole}. Fix: a Shard for each in the plan."
            raise RuntimeError(
                f"[verify] the parallelized {type(model).__name__} failed: {error}\n{advice if whole else NONE_SEEN}"
            ) from error
        left_whole = _left_whole(before, after, handle)
    errors = {}
    for name, wanted in gradients.items():
        total = own_gradients[name].contiguous()
        group.allreduce([total]).wait()
        errors[name] = _difference(total, wanted, max(_largest([wanted]), 1e-3 * _largest(list(gradients.values()))))
    scale = _largest(outputs)
    pairs = zip(own_outputs, outputs, strict=True)
    differences = torch.tensor([_difference(x, wanted, scale) for x, wanted in pairs], dtype=torch.float64)
    worst = differences.nan_to_num(nan=float("inf")).amax(0, keepdim=True)  # a maximum may leave NaN out
    group.allreduce([worst], torch.distributed.ReduceOp.MAX).wait()
    return Verification(float(worst), errors, _tolerance(outputs[0].dtype), left_whole)
