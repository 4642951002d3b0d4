"""The doctor over processes: a rank that dies, hangs or raises costs one case, and the next one is answered."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import ulysses_attention as ua
from ulysses_attention import _C
from ulysses_attention.doctor.process_ranks import WorkerRanks
from ulysses_attention.doctor.run import select
from ulysses_attention.launch import ProcessRanks

Worlds = Callable[[int], ProcessRanks]


def _right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, options: dict[str, Any]) -> Any:
    return ua.ulysses_attention(q, k, v, group, strategy="allgather_kv", **options)


def dies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, **options: Any) -> Any:
    """Rank 1 ends without a word when the lse is asked for."""
    if options.get("return_lse") and group.rank() == 1:
        os._exit(7)
    return _right(q, k, v, group, options)


def hangs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, **options: Any) -> Any:
    """Rank 1 never comes to the call."""
    if options.get("return_lse") and group.rank() == 1:
        time.sleep(600)
    return _right(q, k, v, group, options)


def raises_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, **options: Any) -> Any:
    """Rank 1 refuses, and the others wait for it."""
    if options.get("return_lse") and group.rank() == 1:
        raise NotImplementedError("return_lse is not supported")
    return _right(q, k, v, group, options)


def _verdicts(target: Callable[..., Any], gloo: Worlds) -> tuple[list[dict[str, Any]], WorkerRanks]:
    """Of the plain case, of the one in which the target misbehaves, and of the plain one again."""
    cases = [_C.make_cases(select(target, worlds=[2], cases=glob, quick=True))[0] for glob in ("equal*", "return_lse*")]
    with WorkerRanks(target, worlds=gloo, hang_limit_s=3.0) as ranks:
        return [_C.examine_case(ranks, case)[0][0] for case in (cases[0], cases[1], cases[0])], ranks


def test_the_built_in_backend_is_right_over_processes(gloo: Worlds) -> None:
    with WorkerRanks("ulysses", worlds=gloo) as ranks:
        report = _C.examine(ranks, select("ulysses", worlds=[2], cases="", quick=True))
    refused = {case["feature"] for case in report["cases"] if case["verdict"] == "refused"}
    assert refused == {feature for feature, error_id in _C.capabilities("ulysses").items() if error_id}
    assert [case for case in report["cases"] if case["verdict"] not in ("ok", "refused")] == []
    assert [probe for probe in report["probes"] if probe["verdict"] == "wrong"] == []
    assert {probe["name"] for probe in report["probes"]} == set(_C.probe_names())
    assert ranks.restarts == 0


def test_a_mutant_is_named_over_processes(gloo: Worlds) -> None:
    target = "mutants.local_kv:attention"
    with WorkerRanks(target, worlds=gloo) as ranks:
        (case,) = _C.make_cases(select(target, worlds=[2], cases="equal_shards/*/float32/S16-H4-B2", quick=True))
        ((result, finding),) = _C.examine_case(ranks, case)
    assert (result["verdict"], result["tokens"], result["ranks"]) == ("wrong", "0-15", "0-1")
    assert finding["sentence"] == "each rank attends only to its own tokens: keys 8-15 never influence queries 0-7"


def test_a_process_that_dies_costs_one_case(gloo: Worlds) -> None:
    results, ranks = _verdicts(dies, gloo)
    assert [result["verdict"] for result in results] == ["ok", "crashed", "ok"]
    assert results[1]["ranks"] == "1" and "exit code 7" in results[1]["message"]
    assert ranks.restarts == 1


def test_a_rank_that_hangs_costs_one_case(gloo: Worlds) -> None:
    results, ranks = _verdicts(hangs, gloo)
    assert [result["verdict"] for result in results] == ["ok", "hung", "ok"]
    assert results[1]["message"] == "no answer within 3 s"
    assert ranks.restarts == 1


def test_a_rank_that_raises_alone_is_told_from_a_refusal(gloo: Worlds) -> None:
    results, ranks = _verdicts(raises_alone, gloo)
    assert [result["verdict"] for result in results] == ["ok", "one_rank_only", "ok"]
    assert results[1]["ranks"] == "1" and "return_lse is not supported" in results[1]["message"]
    assert ranks.restarts == 1


def test_own_worlds_end_with_the_questions_and_given_ones_do_not(gloo: Worlds) -> None:
    (case,) = _C.make_cases(select("ulysses", worlds=[2], cases="equal_shards/ulysses/*/float32/*", quick=True))
    started = gloo(2).run(_process)
    launches, processes = ProcessRanks.launches, len(multiprocessing.active_children())
    for worlds in (gloo, None):
        with WorkerRanks("ulysses", worlds=worlds) as ranks:
            assert _C.examine_case(ranks, case)[0][0]["verdict"] == "ok"
    assert ProcessRanks.launches == launches + 1
    assert gloo(2).run(_process) == started
    assert len(multiprocessing.active_children()) == processes


def _process(rank: int, group: Any) -> int:
    return os.getpid()


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("backward is not implemented")


def no_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> torch.Tensor:
    result: torch.Tensor = _NoBackward.apply(q)
    return result


def test_a_backward_that_raises_in_python_is_a_refusal_and_not_a_crash(gloo: Worlds) -> None:
    ranks = WorkerRanks(no_backward, worlds=gloo)
    selection = select(no_backward, worlds=[2], cases="equal_shards/*/float32/S16-H4-B2", quick=True)
    (case,) = _C.make_cases(selection)
    examined = _C.examine_case(ranks, case)
    assert [result["verdict"] for result, _ in examined] == ["refused", "wrong"]  # its forward attends to nothing
    assert ranks.restarts == 0
