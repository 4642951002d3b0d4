"""The operation among torch's own features, eagerly: autocast, checkpointing, derivatives, training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from oracle import max_error, oracle, oracle_with_grads
from refusals import assert_text
from ulysses_attention import (
    _C,
    SequenceLayout,
    UlyssesAttentionProcessor,
    UlyssesContextParallelPolicy,
    run_ranks,
    ulysses_attention,
)

STRATEGIES = ("ulysses", "allgather_kv")
EXACT = UlyssesContextParallelPolicy(pad_multiple=1)


class _Einsum(UlyssesAttentionProcessor):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def _inputs(seq_len: int = 16, heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    return [torch.randn(1, seq_len, heads, 8, generator=generator) for _ in range(4)]


def _shards(rank: int, world: int, seq_len: int = 16) -> list[torch.Tensor]:
    """q, k, v that train, and the weights of a loss."""
    rows = seq_len // world
    q, k, v, weights = (x[:, rows * rank : rows * (rank + 1)].clone() for x in _inputs(seq_len))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), weights]


# --- autocast -------------------------------------------------------------------------------------------------------


def _autocast(rank: int, group: Any, dtype: torch.dtype) -> Any:
    q, k, v, weights = _shards(rank, group.size())
    answers = []
    for how in ("op", "backend", "function"):
        with torch.autocast("cpu", dtype=dtype):
            fused = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
            if how == "backend":
                out = _Einsum().forward(q, k, v, group)
            else:
                kernel = "auto" if how == "op" else (lambda q, k, v, call: _Einsum().attend(q, k, v, call))
                out = ulysses_attention(q, k, v, group, kernel=kernel)
        by_hand = ulysses_attention(*(x.to(dtype) for x in (q, k, v)), group)
        grads = torch.autograd.grad((out * weights).sum(), (q, k, v))
        answers.append((out.dtype == fused.dtype, out.detach(), by_hand.detach(), [g.dtype for g in grads]))
    return answers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_q_k_v_as_torchs_attention_does(dtype: torch.dtype) -> None:
    for answers in run_ranks(lambda rank, group: _autocast(rank, group, dtype), 2):
        for same_as_sdpa, out, by_hand, grad_dtypes in answers:
            assert same_as_sdpa and out.dtype == dtype
            assert max_error(out, by_hand) <= 4 * torch.finfo(dtype).eps
            assert grad_dtypes == [torch.float32] * 3
        assert torch.equal(answers[0][1], answers[0][2])  # the op: the same kernel on the same numbers


# --- checkpointing --------------------------------------------------------------------------------------------------


def _checkpointed(rank: int, group: Any, reentrant: bool | None, strategy: str) -> list[torch.Tensor]:
    q, k, v, weights = _shards(rank, group.size())

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.tanh(ulysses_attention(2 * q, k, v, group, strategy=strategy))

    out = block(q, k, v) if reentrant is None else checkpoint(block, q, k, v, use_reentrant=reentrant)
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in (q, k, v))]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_checkpointing_equals_eager(way: str, reentrant: bool, strategy: str, gloo: Any) -> None:
    def run(how: bool | None) -> list[list[torch.Tensor]]:
        if way == "gloo":
            return gloo(2).run(_checkpointed, how, strategy)
        return run_ranks(lambda rank, group: _checkpointed(rank, group, how, strategy), 2)

    for eager, recomputed in zip(run(None), run(reentrant), strict=True):
        for a, b in zip(eager, recomputed, strict=True):
            assert torch.equal(a, b)
    expected = oracle(2 * _inputs()[0], *_inputs()[1:3])[0].tanh()
    assert max_error(torch.cat([parts[0] for parts in run(reentrant)], 1), expected) < 1e-5


# --- derivatives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ulysses", "allgather_kv", "backend", "gather"])
@pytest.mark.parametrize("world", [1, 2])
def test_cp065_a_second_derivative_is_refused(how: str, world: int) -> None:
    def on_rank(rank: int, group: Any) -> str:
        q, k, v, weights = _shards(rank, world)
        if how == "backend":
            out = _Einsum().forward(q, k, v, group, strategy="allgather_kv")
        elif how == "gather":
            out = SequenceLayout(16, world, EXACT).gather(q, group, grad="sum").narrow(1, 0, 16 // world)
        else:
            out = ulysses_attention(q, k, v, group, strategy=how)
        loss = (out * weights).sum()
        try:
            torch.autograd.grad(loss, (q,), create_graph=True)
        except RuntimeError as error:  # from a backend autograd passes on nothing more precise
            assert how == "backend" or isinstance(error, NotImplementedError)
            torch.autograd.grad((out * weights).sum(), (q,), create_graph=False)  # the fix
            return str(error)
        return ""

    for text in run_ranks(on_rank, world):
        assert_text(text, "CP065", "create_graph=True", "create_graph=False")


def _forward_mode(rank: int, group: Any, how: str) -> str:
    q, k, v = (x.detach() for x in _shards(rank, group.size())[:3])

    def attend(k: torch.Tensor) -> Any:
        if how == "backend":
            return _Einsum().forward(q, k, v, group)
        return ulysses_attention(q, k, v, group, strategy=how)

    with pytest.raises(NotImplementedError) as caught:
        torch.func.jvp(attend, (k,), (torch.ones_like(k),))
    torch.autograd.grad(attend(k.requires_grad_()).sum(), k)  # the fix
    return str(caught.value)


# On processes: torch's level of forward-mode differentiation is one per process, not per thread.
@pytest.mark.parametrize("how", ["ulysses", "allgather_kv", "backend"])
@pytest.mark.parametrize("world", [1, 2])
def test_cp065_a_forward_mode_derivative_is_refused(how: str, world: int, gloo: Any) -> None:
    for text in gloo(world).run(_forward_mode, how):
        assert_text(text, "CP065", "forward-mode", "autograd.grad")


@pytest.mark.parametrize("changed", ["q", "out"])
def test_ulysses_lets_q_and_out_change_before_backward_on_ranks_without_heads_too(changed: str) -> None:
    q, k, v, weights = (x[:, :, :1] for x in _inputs(16))  # one head for two ranks

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        mine = [x[:, 8 * rank : 8 * rank + 8].clone() for x in (q, k, v, weights)]
        leaf = mine[0].requires_grad_()
        passed = leaf * 1.0
        out = ulysses_attention(passed, mine[1], mine[2], group)
        if changed == "q":
            passed.detach().zero_()
        else:
            out.mul_(1.0)
        (out * mine[3]).sum().backward()
        return leaf.grad

    assert max_error(torch.cat(run_ranks(on_rank, 2), 1), oracle_with_grads(q, k, v, weights)["dq"]) < 1e-5


def test_no_grad_and_inference_mode_build_no_graph() -> None:
    def on_rank(rank: int, group: Any) -> Any:
        q, k, v, _ = _shards(rank, 2)
        trained = ulysses_attention(q, k, v, group)
        with torch.no_grad():
            quiet = ulysses_attention(q, k, v, group)
        with torch.inference_mode():
            inferred = ulysses_attention(q, k, v, group)
        return trained.detach(), quiet, inferred, trained.requires_grad, quiet.requires_grad, inferred.requires_grad

    for trained, quiet, inferred, *flags in run_ranks(on_rank, 2):
        assert flags == [True, False, False]
        assert torch.equal(trained, quiet) and torch.equal(trained, inferred)


@pytest.mark.parametrize("trains", ["q", "k", "v", "kv"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_what_trains_gets_a_gradient(strategy: str, trains: str) -> None:
    expected = oracle_with_grads(*_inputs())

    def on_rank(rank: int, group: Any) -> dict[str, Any]:
        tensors = dict(zip("qkv", (x.detach() for x in _shards(rank, 2)[:3]), strict=True))
        for name in trains:
            tensors[name].requires_grad_()
        (ulysses_attention(**tensors, cp_group=group, strategy=strategy) * _shards(rank, 2)[3]).sum().backward()
        return {name: x.grad for name, x in tensors.items()}

    parts = run_ranks(on_rank, 2)
    for name in "qkv":
        grads = [part[name] for part in parts]
        if name in trains:
            assert max_error(torch.cat(grads, 1), expected["d" + name]) < 1e-5
        else:
            assert grads == [None, None]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["op", "function"])
def test_q_and_k_with_the_same_tokens_and_other_padding(how: str, strategy: str) -> None:
    padded = UlyssesContextParallelPolicy(pad_multiple=4)
    wide, tight = SequenceLayout(7, 2, padded), SequenceLayout.from_lengths([4, 3])  # rows 4, 4 and 4, 3
    q, k, v, weights = (x[:, :7] for x in _inputs())
    kernel: Any = "auto" if how == "op" else (lambda q, k, v, call: _Einsum().attend(q, k, v, call))
    for q_layout, kv_layout in ((wide, tight), (tight, wide)):

        def on_rank(rank: int, group: Any, q_layout: Any = q_layout, kv_layout: Any = kv_layout) -> list[Any]:
            layouts = (q_layout, kv_layout, kv_layout)
            leaves = [
                layout.shard(x, rank).clone().requires_grad_() for x, layout in zip((q, k, v), layouts, strict=True)
            ]
            out = ulysses_attention(
                *leaves, group, layout=q_layout, kv_layout=kv_layout, strategy=strategy, kernel=kernel
            )
            (out * q_layout.shard(weights, rank)).sum().backward()
            return [x.grad[:, : layout.lengths[rank]] for x, layout in zip(leaves, layouts, strict=True)]

        parts = run_ranks(on_rank, 2)
        expected = oracle_with_grads(q, k, v, weights)
        for index, name in enumerate(("dq", "dk", "dv")):
            assert max_error(torch.cat([part[index] for part in parts], 1), expected[name]) < 1e-5


# --- a group of one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_of_one_is_plain_attention_without_a_collective(strategy: str) -> None:
    def on_rank(rank: int, group: Any) -> Any:
        recorder = _C.Recorder()
        recorded = _C.record_group(group, recorder)
        q, k, v, weights = _shards(0, 1)
        options: Any = {"strategy": strategy, "is_causal": True, "agreement": "always", "kernel": "cpu_fused"}
        out = ulysses_attention(q, k, v, recorded, **options)
        (out * weights).sum().backward()
        return out.detach(), [x.grad for x in (q, k, v)], recorder.records()

    (((out, grads, records)),) = run_ranks(on_rank, 1)
    assert records == []
    expected = oracle_with_grads(*_inputs(), is_causal=True)
    assert max_error(out, expected["out"]) < 1e-5
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert max_error(grad, expected[name]) < 1e-5
    fused = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in _inputs()[:3]), is_causal=True
    ).transpose(1, 2)
    assert torch.equal(out, fused)


# --- training -------------------------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    """One attention block with a residual and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.qkv = torch.nn.Linear(32, 96)
        self.head = torch.nn.Linear(32, 8)
        for parameter in self.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        return self.head(x + attend(q, k, v).flatten(2))


def _data(seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    return torch.randn(2, seq_len, 32, generator=generator), torch.randn(2, seq_len, 8, generator=generator)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.transpose(2, 3) / q.size(3) ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2)


def _step(model: torch.nn.Module) -> list[torch.Tensor]:
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _train_on_rank(rank: int, group: Any, seq_len: int, strategy: str) -> list[torch.Tensor]:
    """Two SGD steps: each rank's loss is its tokens' part of the mean, and gradients are summed over the group."""
    model = _Model()
    layout = SequenceLayout(seq_len, group.size(), EXACT)
    x, y = (layout.shard(part, rank) for part in _data(seq_len))
    real = layout.lengths[rank]
    for _ in range(2):
        model.zero_grad()
        out = model(x, lambda q, k, v: ulysses_attention(q, k, v, group, layout=layout, strategy=strategy))
        (((out - y)[:, :real] ** 2).sum() / (2 * seq_len * 8)).backward()
        for parameter in model.parameters():
            group.allreduce([parameter.grad]).wait()
        parameters = _step(model)
    return parameters


@pytest.mark.parametrize("seq_len", [16, 13])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_sgd_on_four_ranks_equals_a_single_process(way: str, strategy: str, seq_len: int, gloo: Any) -> None:
    model = _Model().double()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = (part.double() for part in _data(seq_len))
    for _ in range(2):
        model.zero_grad()
        ((model(x, _attend) - y) ** 2).mean().backward()
        expected = _step(model)
    if way == "gloo":
        results = gloo(4).run(_train_on_rank, seq_len, strategy)
    else:
        results = run_ranks(lambda rank, group: _train_on_rank(rank, group, seq_len, strategy), 4)
    for parameters in results:
        for got, want, before in zip(parameters, expected, start, strict=True):
            assert max_error(got, want) < 1e-5
            assert max_error(want, before) > 1e-3  # the steps moved every parameter
