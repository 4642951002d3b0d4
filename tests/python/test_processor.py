"""Backends: a subclass that writes attend() is right, and one that does something else is refused or found wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ulysses_attention
from oracle import max_error, oracle, oracle_with_grads
from refusals import arguments, assert_accepted, assert_refused, assert_text, change, outcomes
from ulysses_attention import (
    SequenceLayout,
    UlyssesAttentionProcessor,
    UlyssesContextParallelPolicy,
    backends,
    register_backend,
    run_ranks,
    unregister_backend,
)

WORLD = 2
STRATEGIES = ("ulysses", "allgather_kv")
TOLERANCE = 1e-5


def _scores(q: torch.Tensor, k: torch.Tensor, call: Any) -> torch.Tensor:
    scale = q.shape[3] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    if call.is_causal:
        scores = scores.masked_fill(call.kv_positions > call.q_positions.unsqueeze(1), -torch.inf)
    return scores


def _weigh(scores: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(q.shape[2] // v.shape[2], 2))


class Einsum(UlyssesAttentionProcessor):
    """Plain attention in einsum: what an author writes first."""

    supports = frozenset({"is_causal", "softmax_scale", "q_positions", "need_lse"})

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> Any:
        scores = _scores(q, k, call)
        return _weigh(scores, q, v), scores.logsumexp(-1)


class Tempered(UlyssesAttentionProcessor):
    """Attention with a trained temperature for each head: parameters inside attend()."""

    def __init__(self, heads: int = 5) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.linspace(0.5, 1.5, heads))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> torch.Tensor:
        heads = self.temperature[call.q_head_start : call.q_head_start + q.shape[2]]
        return _weigh(_scores(q * heads.view(1, 1, -1, 1), k, call), q, v)


def _inputs(seq_len: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and the weights of a loss, equal on every rank."""
    generator = torch.Generator().manual_seed(seq_len)
    return [torch.randn(2, seq_len, h, 8, generator=generator) for h in (heads, kv_heads, kv_heads, heads)]


def _run(
    make: Callable[[], UlyssesAttentionProcessor], world: int, inputs: list[torch.Tensor], **options: Any
) -> tuple[dict[str, torch.Tensor], list[UlyssesAttentionProcessor]]:
    """out, dq, dk, dv of the whole sequence from `world` thread ranks, and each rank's backend."""
    layout = SequenceLayout(inputs[0].shape[1], world, UlyssesContextParallelPolicy(pad_multiple=1))

    def on_rank(rank: int, group: Any) -> Any:
        backend = make()
        q, k, v, weights = (layout.shard(x, rank).clone() for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = backend.forward(q, k, v, group, layout=layout, **options)
        (out * weights).sum().backward()
        real = layout.lengths[rank]
        return [x[:, :real] for x in (out.detach(), *(x.grad for x in leaves))], backend

    parts, made = zip(*run_ranks(on_rank, world), strict=True)
    return dict(zip(("out", "dq", "dk", "dv"), (torch.cat(p, 1) for p in zip(*parts, strict=True)), strict=True)), made


def _largest_error(make: Callable[[], UlyssesAttentionProcessor], world: int = WORLD, **options: Any) -> float:
    inputs = _inputs(12, 4, 4)
    got, _ = _run(make, world, inputs, **options)
    expected = oracle_with_grads(*inputs)
    return max(max_error(got[name], expected[name]) for name in got)


# --- right ones -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("world", "seq_len", "heads", "kv_heads"), [(2, 12, 4, 2), (3, 13, 5, 5), (4, 6, 3, 1), (1, 5, 2, 2)]
)
def test_a_subclass_with_attend_is_right_forward_and_backward(
    strategy: str, world: int, seq_len: int, heads: int, kv_heads: int
) -> None:
    inputs = _inputs(seq_len, heads, kv_heads)
    for is_causal, scale in ((False, None), (True, 0.3)):
        got, _ = _run(Einsum, world, inputs, strategy=strategy, is_causal=is_causal, softmax_scale=scale)
        expected = oracle_with_grads(*inputs, is_causal=is_causal, softmax_scale=scale)
        for name, value in got.items():
            assert max_error(value, expected[name]) <= TOLERANCE * max(1.0, float(expected[name].abs().max())), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_parameters_inside_attend_get_partial_sums(strategy: str, world: int) -> None:
    inputs = _inputs(9, 5, 5)
    got, made = _run(Tempered, world, inputs, strategy=strategy)
    temperature = torch.linspace(0.5, 1.5, 5).double().requires_grad_()
    q, k, v, weights = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q * temperature.view(1, 1, -1, 1), k) / 8**0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    expected = torch.autograd.grad((out * weights).sum(), (*leaves, temperature))
    for name, want in zip(("out", "dq", "dk", "dv"), (out.detach(), *expected[:3]), strict=True):
        assert max_error(got[name], want) < TOLERANCE, name
    grads = [backend.temperature.grad for backend in made if backend.temperature.grad is not None]
    assert max_error(torch.stack(grads).sum(0), expected[3]) < 5 * TOLERANCE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backend_returns_lse(strategy: str) -> None:
    inputs = _inputs(12, 4, 2)[:3]

    def on_rank(rank: int, group: Any) -> Any:
        shards = (x[:, 6 * rank : 6 * rank + 6] for x in inputs)
        return Einsum().forward(*shards, group, strategy=strategy, return_lse=True)

    outs, lses = zip(*run_ranks(on_rank, 2), strict=True)
    out, lse = oracle(*inputs)
    assert max_error(torch.cat(outs, 1), out) < TOLERANCE and max_error(torch.cat(lses, 2), lse) < TOLERANCE


def test_a_function_as_kernel_is_a_backend_of_one_call() -> None:
    inputs = _inputs(12, 4, 2)[:3]
    calls: list[Any] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> Any:
        calls.append((q.shape[1], k.shape[1], call.is_causal, call.q_head_start))
        scores = _scores(q, k, call)
        return _weigh(scores, q, v), scores.logsumexp(-1)

    def shard(rank: int) -> Any:
        q, k, v = (x[:, 6 * rank : 6 * rank + 6] for x in inputs)
        return arguments(q=q, k=k, v=v, kernel=kernel, is_causal=True)

    results = outcomes(2, shard)
    assert_accepted(results)
    assert max_error(torch.cat(results, 1), oracle(*inputs, is_causal=True)[0]) < TOLERANCE
    assert sorted(calls) == [(12, 12, True, 0), (12, 12, True, 2)]


def _einsum_on_gloo(rank: int, group: Any) -> float:
    inputs = _inputs(12, 4, 2)
    layout = SequenceLayout(12, group.size(), UlyssesContextParallelPolicy(pad_multiple=1))
    q, k, v, weights = (layout.shard(x, rank).clone() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = Einsum().forward(q, k, v, group, layout=layout, agreement="always")
    (out * weights).sum().backward()
    expected = oracle_with_grads(*inputs)
    wanted = [layout.shard(expected[name].float(), rank) for name in ("out", "dq", "dk", "dv")]
    return max(max_error(a, b) for a, b in zip((out.detach(), *(x.grad for x in leaves)), wanted, strict=True))


@pytest.mark.parametrize("world", [2, 4])
def test_a_subclass_is_right_on_gloo(world: int, gloo: Any) -> None:
    assert max(gloo(world).run(_einsum_on_gloo)) < TOLERANCE


def test_the_registry() -> None:
    assert register_backend("einsum", Einsum) is Einsum
    try:
        assert list(backends()) == ["ulysses", "einsum"] and isinstance(backends()["einsum"], Einsum)
    finally:
        unregister_backend("einsum")
    unregister_backend("ulysses")  # the built-in one stays
    assert list(backends()) == ["ulysses"]
    assert_accepted(outcomes(WORLD, lambda rank: arguments()))


# --- refused ones ---------------------------------------------------------------------------------------------------


class _Foreign:
    def attend(self, q: Any, k: Any, v: Any, call: Any) -> Any:
        return q


@pytest.mark.parametrize("backend", [_Foreign, Einsum(), "einsum", torch.nn.Module])
def test_cp051_a_class_that_does_not_inherit(backend: Any) -> None:
    with pytest.raises(ValueError) as caught:
        register_backend("foreign", backend)
    assert_text(str(caught.value), "CP051", "does not inherit UlyssesAttentionProcessor")
    assert "foreign" not in backends()

    class Fixed(UlyssesAttentionProcessor):  # the fix in the message
        attend = _Foreign.attend

    register_backend("foreign", Fixed)
    try:
        assert_accepted(outcomes(WORLD, lambda rank: arguments(backend_name="foreign")))
    finally:
        unregister_backend("foreign")


@pytest.mark.parametrize("name", ["ulysses", "", "two\nlines"])
def test_cp051_a_name_under_which_a_backend_would_never_be_called(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        register_backend(name, Einsum)
    assert_text(str(caught.value), "CP051", repr(name), 'register_backend("Einsum", Einsum)')
    assert list(backends()) == ["ulysses"]
    register_backend("Einsum", Einsum)  # the fix in the message
    unregister_backend("Einsum")


def _wrong(result_of: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda q, k, v, call: result_of(q)


@pytest.mark.parametrize(
    ("result_of", "values"),
    [
        (lambda q: q[:, :-1], ("float32 [1, 15, 2, 8]", "out of shape [1, 16, 2, 8] in torch.float32")),
        (lambda q: q.transpose(1, 2), ("[1, 2, 16, 8]", "out of shape [1, 16, 2, 8]")),
        (lambda q: q.double(), ("float64 [1, 16, 2, 8]", "in torch.float32")),
        (lambda q: (q, q), ("lse",)),
        (lambda q: (q, q, q), ("tuple", "return out, or (out, lse)")),
        (lambda q: None, ("NoneType", "return out, or (out, lse)")),
        (lambda q: [q], ("list", "return out, or (out, lse)")),
    ],
)
def test_cp052_attend_returns_something_else(result_of: Any, values: tuple[str, ...]) -> None:
    def call(rank: int) -> Any:
        return arguments(kernel=_wrong(result_of), return_lse="lse" in values)

    assert_refused(outcomes(WORLD, call), ValueError, "CP052", *values)
    fixed = outcomes(
        WORLD, lambda rank: change(call(rank), kernel=lambda q, k, v, call: (q, q[..., 0].transpose(1, 2)))
    )
    assert_accepted(fixed)


class _OwnExchange(Einsum):
    """All-gather of K/V written by hand, with torch's process group methods."""

    def exchange(self, q: Any, k: Any, v: Any, plan: Any, group: Any) -> Any:
        return q, self.whole(k, plan, group), self.whole(v, plan, group)

    def whole(self, x: torch.Tensor, plan: Any, group: Any) -> torch.Tensor:
        shards = [torch.empty_like(x) for _ in range(plan.cp_size)]
        group.allgather([shards], [x.contiguous()]).wait()
        return torch.cat(shards, 1)


class _Repeated(_OwnExchange):
    """The right shape and the wrong content: a rank's own K/V cp_size times."""

    def whole(self, x: torch.Tensor, plan: Any, group: Any) -> torch.Tensor:
        return torch.cat([x] * plan.cp_size, 1)


class _Reversed(_OwnExchange):
    """Every rank's K/V, in the wrong order."""

    def whole(self, x: torch.Tensor, plan: Any, group: Any) -> torch.Tensor:
        return torch.cat(super().whole(x, plan, group).chunk(plan.cp_size, 1)[::-1], 1)


class _OwnTokensOnly(_OwnExchange):
    def whole(self, x: torch.Tensor, plan: Any, group: Any) -> torch.Tensor:
        return x


class _OneRankIsWrong(_OwnExchange):
    """Right but for one token of V on the last rank."""

    def whole(self, x: torch.Tensor, plan: Any, group: Any) -> torch.Tensor:
        whole = super().whole(x, plan, group)
        if plan.cp_rank == plan.cp_size - 1:
            whole[0, 0, 0, 0] += 1
        return whole


def _forward_of(backend: type[UlyssesAttentionProcessor], world: int) -> list[Any]:
    inputs = _inputs(8 * world, 4, 4)[:3]

    def on_rank(rank: int, group: Any) -> Any:
        shards = (x[:, 8 * rank : 8 * rank + 8] for x in inputs)
        try:
            return backend().forward(*shards, group, strategy="allgather_kv")
        except Exception as error:
            return error

    results = run_ranks(on_rank, world, timeout_s=10.0)
    if isinstance(results[0], torch.Tensor):
        assert max_error(torch.cat(results, 1), oracle(*inputs)[0]) < TOLERANCE
    return results


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backend", [_Repeated, _Reversed, _OwnTokensOnly, _OneRankIsWrong])
def test_cp053_keys_that_are_not_the_groups_are_refused_by_content(backend: Any, world: int) -> None:
    results = _forward_of(backend, world)
    assert_refused(results, ValueError, "CP053", "gather K and V of all ranks in rank order")
    if backend is _Repeated:
        assert "tokens 8-15 of K (head 0) are not what rank 1 holds" in str(results[0])
        assert "tokens 0-7 of K (head 0) are not what rank 0 holds" in str(results[1])
    if backend is _OwnTokensOnly:
        assert f"covers 8 and its V 8 of {8 * world} tokens" in str(results[0])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_right_override_of_the_exchange_passes(world: int) -> None:
    assert_accepted(_forward_of(_OwnExchange, world))


class _WrongRestore(Einsum):
    def restore(self, out: Any, lse: Any, plan: Any, group: Any) -> Any:
        return torch.cat([out] * plan.cp_size, 1)


class _WrongRestoreDtype(Einsum):
    def restore(self, out: Any, lse: Any, plan: Any, group: Any) -> Any:
        return out.double()


def test_cp052_an_overridden_restore_of_another_shape_or_dtype() -> None:
    results = _forward_of(_WrongRestore, 2)
    assert_refused(results, ValueError, "CP052", "[2, 16, 4, 8]", "sequence dimension, 1", "[2, 8, 4, 8]")
    assert_refused(_forward_of(_WrongRestoreDtype, 2), ValueError, "CP052", "float64", "torch.float32")


def _raise_on_rank_1(rank: int, group: Any) -> tuple[str, bool]:
    """What the call raised here, and whether the group serves the same call afterwards."""

    def kernel(q: Any, k: Any, v: Any, call: Any) -> Any:
        if rank == 1:
            raise ArithmeticError("attend broke")
        return v

    message = ""
    try:
        ulysses_attention.ulysses_attention(cp_group=group, agreement="always", **arguments(kernel=kernel))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    call = arguments(kernel=lambda q, k, v, call: v, agreement="always")
    return message, torch.equal(ulysses_attention.ulysses_attention(cp_group=group, **call), call["v"])


@pytest.mark.parametrize("way", ["threads", "gloo"])
def test_cp067_attend_that_raises_on_one_rank_is_told_to_the_others(way: str, gloo: Any) -> None:
    results = run_ranks(_raise_on_rank_1, 4) if way == "threads" else gloo(4).run(_raise_on_rank_1, timeout_s=30.0)
    for rank, (message, works) in enumerate(results):
        assert works
        if rank == 1:
            assert message == "ArithmeticError: attend broke"
        else:
            text = message.removeprefix("RuntimeError: ")
            assert_text(
                text, "CP067", "attend() failed on rank 1: ArithmeticError: attend broke (rank", "rank 1 raised"
            )


def test_cp062_attend_that_raises_on_one_rank_unblocks_the_others() -> None:
    seen: dict[int, str] = {}

    def on_rank(rank: int, group: Any) -> Any:
        def kernel(q: Any, k: Any, v: Any, call: Any) -> Any:
            if rank == 1:
                raise ArithmeticError("attend broke")
            return q

        try:
            return ulysses_attention.ulysses_attention(cp_group=group, **arguments(kernel=kernel))
        except RuntimeError as error:
            seen[rank] = str(error)
            raise

    with pytest.raises(ArithmeticError, match="attend broke"):
        run_ranks(on_rank, 4)
    assert sorted(seen) == [0, 2, 3]
    for text in seen.values():
        assert_text(text, "CP062", "rank 1", "ArithmeticError", "attend broke")
