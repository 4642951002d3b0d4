"""The gate: a backend on several ranks gives the numbers of one process, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

import ulysses_attention as ua
from oracle import Numbers, max_error, oracle_with_grads, tolerance
from ulysses_attention.launch import ProcessRanks

BUILT_IN = "ulysses"
_CASES = [  # S, (H, H_kv), causal, B: heads and tokens that no number of ranks divides, whole and torn head groups
    (45, (6, 6), False, 1),
    (45, (6, 6), True, 2),
    (32, (8, 2), False, 2),
    (30, (5, 1), True, 1),
]


def _inputs(case: tuple[int, tuple[int, int], bool, int]) -> list[torch.Tensor]:
    seq_len, (heads, kv_heads), _, batch = case
    generator = torch.Generator().manual_seed(seq_len)
    return [torch.randn(batch, seq_len, h, 8, generator=generator) for h in (heads, kv_heads, kv_heads, heads)]


def _attend(
    group: Any, backend: str, strategy: str, case: tuple[int, tuple[int, int], bool, int], device: torch.device
) -> Numbers:
    """out, dq, dk, dv of the whole sequence, put together on every rank."""
    layout = ua.SequenceLayout(case[0], group.size(), cp_rank=group.rank())
    local = [layout.shard(x.to(device), group.rank()) for x in _inputs(case)]
    leaves = [x.detach().requires_grad_() for x in local[:3]]
    policy = ua.UlyssesContextParallelPolicy(backend_name=backend)
    out = ua.ulysses_attention(
        *leaves, group, policy=policy, strategy=strategy, is_causal=case[2], layout=layout, agreement="always"
    )
    assert isinstance(out, torch.Tensor)
    grads = torch.autograd.grad(out, leaves, local[3])
    shards = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    return {name: layout.gather(x, group, grad="slice").cpu() for name, x in shards.items()}


def _serves(strategy: str, is_causal: bool, supports: frozenset[str]) -> bool:
    needed = {"is_causal", "q_positions"} if strategy == "allgather_kv" else {"is_causal"}
    return not is_causal or needed <= supports


def _run(
    rank: int, group: Any, backend: str, backend_class: type | None, strategy: str, device: list[torch.device]
) -> list[Numbers | str]:
    """One answer per case: the numbers, or the text of a refusal that every rank raised."""
    if backend_class is not None:
        ua.register_backend(backend, backend_class)
    answers: list[Numbers | str] = []
    try:
        for case in _CASES:
            try:
                answers.append(_attend(group, backend, strategy, case, device[rank]))
            except (ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
                if "[CP" not in str(error) or "[CP06" in str(error):
                    raise  # not raised on every rank: the others wait, so the world must end
                answers.append(str(error))
    finally:
        ua.unregister_backend(backend)
    return answers


def assert_matches_single_card(ranks: ProcessRanks, backend: str, strategy: str) -> None:
    """Run a registered backend on every rank of the world and compare output and gradients with one process.

    The backend's class is sent to the ranks, so it must lie in a module. A case that the backend does not declare
    (causal queries) must be refused with CP050; every other must give the float64 numbers within the tolerance.
    Raises AssertionError that names backend, strategy, number of ranks, case and tensor.
    """
    registered = ua.backends()[backend]
    built_in = backend == BUILT_IN
    devices = [ranks.device(rank) for rank in range(ranks.world)]
    answers = ranks.run(_run, backend, None if built_in else type(registered), strategy, devices)
    wrong = []
    for index, case in enumerate(_CASES):
        serves = built_in or _serves(strategy, case[2], frozenset(registered.supports))
        reference = oracle_with_grads(*_inputs(case), is_causal=case[2])
        for rank, given in enumerate(answers):
            answer = given[index]
            where = f"S, heads, causal, B = {case}, rank {rank}"
            if isinstance(answer, str):
                if serves or "[CP050]" not in answer:
                    wrong.append(f"{where}: {answer}")
                continue
            if not serves:
                wrong.append(f"{where}: a causal call ran although the backend does not declare it")
            for name, got in answer.items():
                error, allowed = max_error(got, reference[name]), tolerance(torch.float32, reference[name])
                if not error <= allowed:
                    wrong.append(f"{where}: {name} is off by {error:.2e}, allowed {allowed:.2e}")
    summary = "\n".join(wrong[:12])
    assert not wrong, f'backend "{backend}", strategy "{strategy}" on {ranks.world} ranks differs from one:\n{summary}'
