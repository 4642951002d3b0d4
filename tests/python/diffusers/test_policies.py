"""The policy of a parallelized model: kept where lengths divide, an error with lengths that work where they do not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from same_model import OneProcess, call, call_without_gradient, family, on_rank, one_process
from ulysses_attention import (
    UlyssesAttentionProcessor,
    UlyssesContextParallelPolicy,
    register_backend,
    run_ranks,
    unregister_backend,
)
from ulysses_attention.diffusers import parallelize

STRICT = UlyssesContextParallelPolicy(auto_pad=False)
STRICT_1 = UlyssesContextParallelPolicy(auto_pad=False, pad_multiple=1)
PADS = UlyssesContextParallelPolicy()
PADS_1 = UlyssesContextParallelPolicy(pad_multiple=1)


def _flux(image: int, text: int) -> OneProcess:
    wanted = family("flux", text)
    inputs = {name: wanted.inputs[name][..., :image, :] for name in ("hidden_states", "img_ids")}
    return one_process(copy.deepcopy(wanted.model), wanted.inputs | inputs)


@pytest.mark.parametrize(
    ("policy", "image", "text", "words"),
    [
        (STRICT, 21, 16, ("seq_len=21", "cp_size=2", "[CP010]")),
        (STRICT, 20, 16, ("seq_len=20", "cp_size*pad_multiple", "pad to 32", "[CP011]")),
        (STRICT_1, 20, 7, ("seq_len=7", "pad to 8", "[CP010]")),
        (PADS, 20, 16, ("'image' has 20 tokens, which this policy pads to 32", "Fix: 32 tokens, or policy=None")),
        (PADS_1, 20, 7, ("'text' has 7 tokens, which this policy pads to 8", "Fix: 8 tokens, or policy=None")),
    ],
)
def test_lengths_that_do_not_divide_are_refused_on_every_rank(
    policy: UlyssesContextParallelPolicy, image: int, text: int, words: tuple[str, ...]
) -> None:
    wanted = _flux(image, text)
    models = [copy.deepcopy(wanted.model) for _ in range(2)]

    def refused(rank: int, group: Any) -> str:
        with parallelize(models[rank], group, policy=policy), pytest.raises(ValueError) as raised:
            call(models[rank], wanted.inputs)
        return str(raised.value)

    for refusal in run_ranks(refused, 2):
        for word in words:
            assert word in refusal, (word, refusal)


@pytest.mark.parametrize(("policy", "text"), [(STRICT, 16), (PADS, 32), (STRICT_1, 8), (PADS_1, 2)])
def test_lengths_that_divide_are_right(policy: UlyssesContextParallelPolicy, text: int) -> None:
    wanted = _flux(16 if policy.pad_multiple == 8 else 20, text)
    models = [copy.deepcopy(wanted.model) for _ in range(2)]
    run_ranks(lambda rank, group: on_rank(group, models[rank], wanted, {"policy": policy}), 2)


class Counted(UlyssesAttentionProcessor):
    """Plain attention that counts its keys."""

    supports = frozenset({"softmax_scale"})
    keys: list[int]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        type(self).keys.append(k.size(1))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, scale=call.softmax_scale)
        return out.transpose(1, 2)


@pytest.fixture
def counted() -> Iterator[list[int]]:
    Counted.keys = []
    register_backend("counted", Counted)
    yield Counted.keys
    unregister_backend("counted")


def test_the_backend_of_the_policy_is_the_one_that_attends(counted: list[int]) -> None:
    policy = UlyssesContextParallelPolicy(require_seq_divisible=False, backend_name="counted")
    wanted = family("flux")
    models = [copy.deepcopy(wanted.model) for _ in range(2)]
    run_ranks(lambda rank, group: on_rank(group, models[rank], wanted, {"policy": policy}), 2)
    assert set(counted) == {28}


def test_a_policy_field_that_is_not_honoured_is_refused() -> None:
    policy = UlyssesContextParallelPolicy(require_seq_divisible=False, output_restore_dim=2)
    wanted = family("flux")
    models = [copy.deepcopy(wanted.model) for _ in range(2)]

    def refused(rank: int, group: Any) -> str:
        with (
            parallelize(models[rank], group, policy=policy),
            pytest.raises((ValueError, NotImplementedError)) as raised,
        ):
            call_without_gradient(models[rank], wanted.inputs)
        return str(raised.value)

    for refusal in run_ranks(refused, 2):
        assert "output_restore_dim" in refusal and "Fix: " in refusal


def _a_mesh(rank: int, group: Any) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    wanted = family("wan")
    model = copy.deepcopy(wanted.model)
    with pytest.raises(NotImplementedError) as raised:
        parallelize(model, mesh)
    fix = re.search(r"Fix: (mesh\[.*\])\.", str(raised.value))
    assert fix is not None and fix[1] == 'mesh["ulysses"]'
    with parallelize(model, mesh["ulysses"]):
        error = (call_without_gradient(model, wanted.inputs) - wanted.out).abs().max()
    assert error < 1e-5 * wanted.out.abs().max()
    return str(raised.value)


def test_a_mesh_of_two_dimensions_is_refused_and_its_fix_is_right(gloo: Callable[[int], Any]) -> None:
    for text in gloo(2).run(_a_mesh):
        assert "a 2-D mesh asks for a hybrid of strategies" in text and text.endswith("[CP047]")
