"""The helpers beside torch's own: wrappers, accumulation, recomputation, clipping and autocast, on processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import ulysses_attention as ua
from oracle import max_error
from training_cases import (
    Decoder,
    causal_attention,
    dropout_of,
    layouts_of,
    loss_of_one_process,
    new_batch,
    new_decoder,
    own_sum_and_count,
    sharded_attention,
    whole_dropout,
)
from ulysses_attention.launch import ProcessRanks

Gloo = Callable[[int], ProcessRanks]
SEQ_LEN, BATCH, P = 13, 4, 0.2
MAX_NORM = 0.5  # below the norm of the gradients, so that clipping clips
Answer = tuple[float, list[torch.Tensor], float]  # loss, gradients after clipping, their norm before


def _cut(seq_len: int, world: int, how: str = "uneven") -> ua.SequenceLayout:
    return layouts_of(seq_len, world)[how]


@functools.cache
def _alone(p: float = P) -> Answer:
    """One process, the whole batch. The rows of a data-parallel rank have its number in their seed."""
    model = new_decoder(causal_attention, whole_dropout(SEQ_LEN), torch.float64, p=p)
    tokens, labels = new_batch(SEQ_LEN, BATCH, 0)
    logits = torch.cat([model(tokens[at : at + 2], seed=(at // 2,)) for at in range(0, BATCH, 2)])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM).item()
    return loss.item(), [parameter.grad for parameter in model.parameters()], norm


def _assert_alike(answers: list[Answer], p: float = P) -> None:
    loss, grads, norm = _alone(p)
    assert norm > 1.5 * MAX_NORM
    for got_loss, got_grads, got_norm in answers:
        assert abs(got_loss - loss) < 1e-6 and abs(got_norm - norm) < 1e-6
        for got, wanted in zip(got_grads, grads, strict=True):
            assert max_error(got, wanted) < 1e-6
    assert max(grad.abs().max().item() for grad in grads) > 1e-2


def _mesh() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    return mesh


def _model_and_part(mesh: DeviceMesh) -> tuple[Decoder, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    """A model over the mesh's cp group, and (sum, count) of this rank's tokens: a batch row pair per dp rank."""
    cp, dp_rank = mesh["cp"].get_group(), mesh["dp"].get_local_rank()
    layout = _cut(SEQ_LEN, cp.size())
    model = new_decoder(sharded_attention(cp, layout), dropout_of(layout, cp.rank()), torch.float64, p=P)
    tokens, labels = (x[2 * dp_rank : 2 * dp_rank + 2] for x in new_batch(SEQ_LEN, BATCH, 0))
    return model, lambda wrapped: own_sum_and_count(wrapped, (tokens, labels), layout, cp.rank(), seed=(dp_rank,))


def _clipped(loss: torch.Tensor, model: torch.nn.Module) -> Answer:
    """DTensors as one process holds them."""

    def whole(x: Any) -> torch.Tensor:
        return x.full_tensor() if hasattr(x, "full_tensor") else x

    norm = whole(clip_grad_norm_(model.parameters(), MAX_NORM))
    return loss.item(), [whole(parameter.grad) for parameter in model.parameters()], norm.item()


# --- data parallelism beside it ---------------------------------------------------------------------------------------


def _fully_sharded(rank: int, group: Any, over: str) -> Answer:
    """over "dp_cp": fully_shard reduces over all ranks. Over "dp": it does so over half, and sum_gradients over cp."""
    mesh = _mesh()
    shard_mesh = mesh[over]
    model, part = _model_and_part(mesh)
    for block in model.blocks:
        fully_shard(block, mesh=shard_mesh)
    fully_shard(model, mesh=shard_mesh)
    loss = ua.token_mean_loss(*part(model), mesh["dp_cp"], averaged_over=shard_mesh.size())
    loss.backward()
    if over == "dp":
        ua.sum_gradients(model.parameters(), mesh["cp"])
    return _clipped(loss, model)


@pytest.mark.parametrize("over", ["dp_cp", "dp"])
def test_fully_shard_has_the_gradients_and_the_norm_of_one_process(over: str, gloo: Gloo) -> None:
    _assert_alike(gloo(4).run(_fully_sharded, over))


def _refused(rank: int, group: Any, over: str) -> str:
    mesh = _mesh()
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=mesh[over])
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.grad.to_local().clone()
    with pytest.raises(ValueError) as raised:
        ua.sum_gradients(model.parameters(), mesh["cp"])
    assert torch.equal(model.weight.grad.to_local(), before)
    return str(raised.value)


def test_cp069_gradients_that_fully_shard_has_combined_are_refused(gloo: Gloo) -> None:
    """Summed again they would be of other rows: each rank holds another shard."""
    for error in gloo(4).run(_refused, "dp_cp"):
        assert error.startswith("[sum_gradients] parameter 0 on rank 0 is a DTensor over ranks of this same group")
        assert error.endswith(
            "Fix: leave sum_gradients out, and say averaged_over=group.size() to token_mean_loss. [CP069]"
        )


def _over_two_dimensions(rank: int, group: Any) -> list[str]:
    errors = []
    for call in (
        lambda mesh: ua.sum_gradients([], mesh),
        lambda mesh: ua.token_mean_loss(torch.ones(()), 1, mesh),
        lambda mesh: ua.total_tokens(1, mesh),
    ):
        with pytest.raises(ValueError) as raised:
            call(_mesh())
        errors.append(str(raised.value))
    return errors


def test_cp063_a_mesh_of_two_dimensions_is_refused(gloo: Gloo) -> None:
    for errors in gloo(4).run(_over_two_dimensions):
        for name, error in zip(("sum_gradients", "token_mean_loss", "total_tokens"), errors, strict=True):
            assert error.startswith(f"[{name}] a mesh of several dimensions does not say over which. Fix: one of them")
            assert error.endswith("[CP063]")


def _missing_on_one(rank: int, group: Any) -> list[Any]:
    """fully_shard over dp; on cp rank 1 nothing runs, as where a branch of the model is not taken."""
    mesh = _mesh()
    used, unused = torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(3, 4, bias=False)
    for model in (used, unused):
        torch.nn.init.ones_(model.weight)
        fully_shard(model, mesh=mesh["dp"])
    if mesh["cp"].get_local_rank() == 0:
        used(torch.full((1, 3), 2.0)).sum().backward()
    ua.sum_gradients([used.weight, unused.weight], mesh["cp"])
    return [used.weight.grad.full_tensor(), unused.weight.grad]


def test_a_sharded_gradient_that_is_missing_on_one_rank_is_made(gloo: Gloo) -> None:
    for used, unused in gloo(4).run(_missing_on_one):
        assert torch.equal(used, torch.full((4, 3), 2.0)) and unused is None


def _data_parallel(rank: int, group: Any, over: str) -> Answer:
    mesh = _mesh()
    model, part = _model_and_part(mesh)
    wrapped = DistributedDataParallel(model, process_group=mesh[over].get_group())
    loss = ua.token_mean_loss(*part(wrapped), mesh["dp_cp"], averaged_over=mesh[over].size())
    loss.backward()
    if over == "dp":
        ua.sum_gradients(wrapped.parameters(), mesh["cp"])
    return _clipped(loss, wrapped)


@pytest.mark.parametrize("over", ["dp_cp", "dp"])
def test_ddp_has_the_gradients_and_the_norm_of_one_process(over: str, gloo: Gloo) -> None:
    _assert_alike(gloo(4).run(_data_parallel, over))


def _by_hand(rank: int, group: Any) -> Answer:
    """No wrapper: sum_gradients over all ranks."""
    mesh = _mesh()
    model, part = _model_and_part(mesh)
    loss = ua.token_mean_loss(*part(model), mesh["dp_cp"])
    loss.backward()
    ua.sum_gradients(model.parameters(), mesh["dp_cp"])
    return _clipped(loss, model)


def test_without_a_wrapper_the_sum_over_all_ranks_is_the_gradient(gloo: Gloo) -> None:
    _assert_alike(gloo(4).run(_by_hand))


# --- accumulation, recomputation, local means -------------------------------------------------------------------------


def _accumulated(rank: int, group: Any, how: str, recompute: bool, wrapper: bool) -> Answer:
    layout = _cut(SEQ_LEN, group.size(), how)
    model = new_decoder(
        sharded_attention(group, layout), dropout_of(layout, rank), torch.float64, p=P, recompute=recompute
    )
    wrapped = DistributedDataParallel(model) if wrapper else model
    tokens, labels = new_batch(SEQ_LEN, BATCH, 0)
    own_labels = layout.shard(labels, rank)[:, : layout.lengths[rank]]
    total = ua.total_tokens((own_labels != -100).sum(), group)
    assert total == (labels != -100).sum()
    loss = torch.zeros(())
    for at in range(0, BATCH, 2):  # micro-batches with unequal numbers of labels
        part = own_sum_and_count(wrapped, (tokens[at : at + 2], labels[at : at + 2]), layout, rank, seed=(at // 2,))
        mean = ua.token_mean_loss(*part, group, total=total, averaged_over=group.size() if wrapper else 1)
        mean.backward()
        loss += mean.detach()
    if not wrapper:
        ua.sum_gradients(model.parameters(), group)
    return _clipped(loss, model)


@pytest.mark.parametrize("how", ["padded", "uneven"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_accumulated_and_recomputed_gradients_are_those_of_one_process(recompute: bool, world: int, how: str) -> None:
    labels = new_batch(SEQ_LEN, BATCH, 0)[1] != -100
    assert labels[:2].sum() != labels[2:].sum()
    _assert_alike(ua.run_ranks(lambda rank, group: _accumulated(rank, group, how, recompute, False), world))


@pytest.mark.parametrize("wrapper", [False, True])
def test_accumulation_and_recomputation_over_processes(wrapper: bool, gloo: Gloo) -> None:
    _assert_alike(gloo(2).run(_accumulated, "padded", True, wrapper))


def _local_mean(rank: int, group: Any, wrapper: bool) -> list[torch.Tensor]:
    """Code that takes the mean of its own tokens, all of which count."""
    layout = _cut(SEQ_LEN, group.size())
    model = new_decoder(sharded_attention(group, layout), dropout_of(layout, rank), torch.float64)
    wrapped = DistributedDataParallel(model) if wrapper else model
    tokens = layout.shard(new_batch(SEQ_LEN, 2, 0)[0], rank)
    mean = F.cross_entropy(wrapped(tokens).flatten(0, 1), tokens.flatten())
    (mean * ua.loss_scale(layout, rank, averaged_over=group.size() if wrapper else 1)).backward()
    if not wrapper:
        ua.sum_gradients(model.parameters(), group)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("wrapper", [False, True])
def test_scaled_local_means_have_the_gradients_of_one_process(wrapper: bool, gloo: Gloo) -> None:
    alone = new_decoder(causal_attention, whole_dropout(SEQ_LEN), torch.float64)
    tokens = new_batch(SEQ_LEN, 2, 0)[0]
    F.cross_entropy(alone(tokens).flatten(0, 1), tokens.flatten()).backward()
    for grads in gloo(2).run(_local_mean, wrapper):
        for got, parameter in zip(grads, alone.parameters(), strict=True):
            assert max_error(got, parameter.grad) < 1e-6


# --- autocast ---------------------------------------------------------------------------------------------------------


def _autocast(rank: int, group: Any) -> tuple[float, list[torch.Tensor]]:
    layout = _cut(SEQ_LEN, group.size())
    model = new_decoder(sharded_attention(group, layout), dropout_of(layout, rank), p=P)
    with torch.autocast("cpu", torch.bfloat16):
        part = own_sum_and_count(model, new_batch(SEQ_LEN, BATCH, 0), layout, rank)
        assert model.head(torch.zeros(1, 24)).dtype == torch.bfloat16
        loss = ua.token_mean_loss(*part, group)
    loss.backward()
    ua.sum_gradients(model.parameters(), group)
    return loss.item(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("world", [2, 3])
def test_autocast_to_bfloat16_is_as_near_as_one_process_under_it(world: int) -> None:
    batch = new_batch(SEQ_LEN, BATCH, 0)
    exact = new_decoder(causal_attention, whole_dropout(SEQ_LEN), torch.float64, p=P)
    loss_of_one_process(exact, *batch).backward()
    alone = new_decoder(causal_attention, whole_dropout(SEQ_LEN), p=P)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of_one_process(alone, *batch)
    loss.backward()
    for got_loss, grads in ua.run_ranks(_autocast, world):
        assert abs(got_loss - loss.item()) < 1e-2
        for got, one, wanted in zip(grads, alone.parameters(), exact.parameters(), strict=True):
            assert got.dtype == torch.float32
            own_error = max_error(one.grad, wanted.grad)
            assert max_error(got, wanted.grad) < 3 * own_error + 1e-3 * wanted.grad.abs().max()


# --- another device ---------------------------------------------------------------------------------------------------


def _on_device(rank: int, group: Any) -> list[torch.Tensor]:
    """A shard's loss, gradients and random numbers, on the GPU where there is one a rank."""
    device = torch.device("cuda", rank) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    layout = _cut(SEQ_LEN, group.size())
    x = torch.arange(float(SEQ_LEN), dtype=torch.float64, device=device)[None, :, None]
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64, device=device))
    nowhere = torch.nn.Parameter(torch.ones(2, device=device))
    own = layout.shard(x, rank) * weight
    loss = ua.token_mean_loss(own.square().sum(), layout.lengths[rank], group)
    loss.backward()
    ua.sum_gradients([weight, nowhere], group)
    assert nowhere.grad is None
    mask = ua.token_dropout(torch.ones_like(own), 0.5, 1, layout, rank)
    noise = ua.token_noise((1, SEQ_LEN, 4), layout, rank, seed=2, device=device)
    assert {value.device for value in (loss, weight.grad, mask, noise)} == {device}
    return [value.detach().cpu() for value in (loss, weight.grad, mask, noise)]


@pytest.mark.multi_gpu(2)
def test_one_device_a_rank_has_the_numbers_of_one_cpu_process(ranks: Callable[..., ProcessRanks]) -> None:
    answers = ranks().run(_on_device)
    squares = torch.arange(float(SEQ_LEN), dtype=torch.float64).square().mean()
    for loss, grad, _, _ in answers:
        assert abs(loss - squares) < 1e-9 and abs(grad - 2 * squares) < 1e-9
    whole = ua.SequenceLayout.from_lengths([SEQ_LEN])
    mask = ua.token_dropout(torch.ones(1, SEQ_LEN, 1, dtype=torch.float64), 0.5, 1, whole, 0)
    assert torch.equal(torch.cat([answer[2] for answer in answers], 1), mask)
    noise = ua.token_noise((1, SEQ_LEN, 4), whole, 0, seed=2)
    assert (torch.cat([answer[3] for answer in answers], 1) - noise).abs().max() < 1e-6
