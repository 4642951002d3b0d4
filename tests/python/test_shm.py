"""Ranks that are processes over shared memory: what torch.distributed's own functions get from the backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import ulysses_attention as ua
from cells import Cell, assert_right, run_cells
from refusals import assert_text
from ulysses_attention import _C
from ulysses_attention.doctor.process_ranks import WorkerRanks
from ulysses_attention.doctor.run import select
from ulysses_attention.launch import ProcessRanks

Worlds = Callable[[int], ProcessRanks]
WORLD = 3
LARGE = 400_003  # of 4 bytes or more: beyond a chunk of 1 MiB, and no multiple of anything
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers below 8, different on every rank: every sum of three is exact in every dtype."""
    return ((torch.arange(count) % 5 + rank) % 7).to(dtype)


def _sum(count: int, dtype: torch.dtype) -> torch.Tensor:
    total = torch.stack([_values(rank, count, dtype).to(torch.complex128) for rank in range(WORLD)]).sum(0)
    return (total != 0) if dtype == torch.bool else total.real.to(dtype)


def _rows(source: int, destination: int, count: int) -> int:
    return 0 if (source + destination) % WORLD == 0 else count // (1 + source) + destination


def _operations(rank: int, count: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(operation, what came of it, what must)"""
    mine, every = _values(rank, count, dtype), [_values(r, count, dtype) for r in range(WORLD)]

    def empty(length: int = count) -> torch.Tensor:
        return torch.ones(length, dtype=dtype)

    whole = empty(count * WORLD)
    dist.all_gather_single(whole, mine)
    yield "all_gather_single", whole, torch.cat(every)
    parts = [empty() for _ in every]
    dist.all_gather(parts, mine)
    yield "all_gather", torch.cat(parts), torch.cat(every)
    rows_in = [_rows(rank, peer, count) for peer in range(WORLD)]
    rows_out = [_rows(peer, rank, count) for peer in range(WORLD)]
    blocks = [_values(rank + peer, n, dtype) for peer, n in enumerate(rows_in)]
    expected = torch.cat([_values(peer + rank, n, dtype) for peer, n in enumerate(rows_out)])
    whole = empty(sum(rows_out))
    dist.all_to_all_single(whole, torch.cat(blocks), rows_out, rows_in)
    yield "all_to_all_single", whole, expected
    parts = [empty(n) for n in rows_out]
    dist.all_to_all(parts, blocks)
    yield "all_to_all", torch.cat(parts), expected
    said = mine.clone()
    dist.broadcast(said, 1)
    yield "broadcast", said, every[1]
    parts = [empty() for _ in every]
    dist.gather(mine, parts if rank == 2 else None, 2)
    yield "gather", torch.cat(parts), torch.cat(every) if rank == 2 else empty(count * WORLD)
    said = empty()
    dist.scatter(said, every if rank == 0 else None, 0)
    yield "scatter", said, mine
    total = mine.clone()
    dist.all_reduce(total)
    yield "all_reduce", total, _sum(count, dtype)
    total = mine.clone()
    dist.reduce(total, 1)
    yield "reduce", total, _sum(count, dtype) if rank == 1 else mine
    part = empty()
    dist.reduce_scatter_single(part, torch.cat([_values(rank, count, dtype)] * WORLD))
    yield "reduce_scatter_single", part, _sum(count, dtype)
    part = empty()
    dist.reduce_scatter(part, [_values(rank, count, dtype)] * WORLD)
    yield "reduce_scatter", part, _sum(count, dtype)


def _check_operations(rank: int, group: Any, dtype: torch.dtype) -> tuple[int, list[str]]:
    wrong, asked = [], 0
    for count in (0, 1, 5, LARGE):
        for name, got, expected in _operations(rank, count, dtype):
            asked += 1
            if got.dtype != expected.dtype or not torch.equal(got, expected):
                wrong.append(f"{name} of {count}")
    return asked, wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_has_its_closed_form(shm: Worlds, dtype: torch.dtype) -> None:
    assert shm(WORLD).run(_check_operations, dtype) == [(4 * 11, [])] * WORLD


def _reductions(rank: int, group: Any) -> dict[str, list[Any]]:
    found = {}
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        x = torch.tensor([rank + 1.0, 4.0])
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        found[name] = x.tolist()
    for name in ("BAND", "BOR", "BXOR"):
        bits = torch.tensor([1 << rank, 7])
        dist.all_reduce(bits, getattr(dist.ReduceOp, name))
        found[name] = bits.tolist()
    return found


def test_every_reduction_has_its_closed_form(shm: Worlds) -> None:
    expected: dict[str, list[Any]] = {
        "SUM": [6.0, 12.0],
        "AVG": [2.0, 4.0],
        "PRODUCT": [6.0, 64.0],
        "MIN": [1.0, 4.0],
        "MAX": [3.0, 4.0],
        "BAND": [0, 7],
        "BOR": [7, 7],
        "BXOR": [7, 7],
    }
    assert shm(WORLD).run(_reductions) == [expected] * WORLD


def _finished_works(rank: int, group: Any) -> tuple[bool, list[float], list[Any]]:
    x = torch.tensor([float(rank)])
    work = dist.all_reduce(x, async_op=True)
    done, (result,) = work.is_completed(), work.get_future().wait()
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
    return done, result.tolist(), [(o["rank"], len(o["text"])) for o in objects]


def test_an_async_collective_is_done_when_the_call_returns(shm: Worlds) -> None:
    assert shm(WORLD).run(_finished_works) == [(True, [3.0], [(0, 0), (1, 1000), (2, 2000)])] * WORLD


def _messages(rank: int, group: Any) -> list[bool]:
    right, left = (rank + 1) % WORLD, (rank - 1) % WORLD
    received = torch.empty(LARGE, dtype=torch.float64)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, _values(rank, LARGE, torch.float64), right),
            dist.P2POp(dist.irecv, received, left),
        ]
    )
    for work in works:
        work.wait()
    first, second = torch.empty(2), torch.empty(2, 2).t()
    dist.send(torch.full((2,), 10.0 + rank), right, tag=1)
    dist.send(torch.full((2, 2), 20.0 + rank), right, tag=2)
    dist.recv(second, left, tag=2)  # in another order than they were sent
    dist.recv(first, left, tag=1)
    return [
        torch.equal(received, _values(left, LARGE, torch.float64)),
        bool((first == 10.0 + left).all()),
        bool((second == 20.0 + left).all()),
    ]


def test_messages_go_round_a_ring(shm: Worlds) -> None:
    assert shm(WORLD).run(_messages) == [[True] * 3] * WORLD


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


def _plain_torch(rank: int, group: Any) -> dict[str, Any]:
    """Nothing of ours but the backend."""
    x = torch.full((WORLD,), float(rank)).requires_grad_()
    y: torch.Tensor = _Exchanged.apply(x)
    (y * (rank + 1)).square().sum().backward()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    z = torch.full((WORLD,), float(rank)).requires_grad_()
    splits = [1] * WORLD
    traced = functional.all_to_all_single_autograd(z, splits, splits, mesh.get_group("cp"))
    (functional.wait_tensor(traced) * (rank + 1)).square().sum().backward()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    data = torch.randn(6, 4)
    model(data[2 * rank : 2 * rank + 2]).square().mean().backward()
    gathered = functional.all_gather_tensor(torch.full((1, 2), float(rank)), 0, mesh)
    return {
        "exchanged": x.grad,
        "traced": z.grad,
        "ddp": model.module.weight.grad,
        "data": data,
        "gathered": gathered.tolist(),
        "backend": dist.get_backend(mesh.get_group("cp")),
    }


def test_plain_torch_programs_and_autograd_run_over_it(shm: Worlds) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    for rank, found in enumerate(shm(WORLD).run(_plain_torch)):
        # Rank p squares (p + 1) r of rank r: dL/dx_r[p] = 2 (p + 1)² r.
        gradient = 2 * torch.arange(1.0, WORLD + 1).square() * rank
        assert torch.equal(found["exchanged"], gradient) and torch.equal(found["traced"], gradient)
        model.weight.grad = None
        model(found["data"]).square().mean().backward()  # of the whole batch on one process
        torch.testing.assert_close(found["ddp"], model.weight.grad)
        assert found["gathered"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def _beside_gloo(rank: int, group: Any) -> list[Any]:
    found: list[Any] = [dist.get_backend()]
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",), backend_override={"cp": "ulysses_shm"})
    groups = [mesh.get_group("cp"), dist.new_group(backend="ulysses_shm"), dist.new_group(backend="cpu:ulysses_shm")]
    for one in groups:
        x = torch.full((LARGE,), float(rank))
        dist.all_reduce(x, group=one)
        found.append(bool((x == 3.0).all()))
    pair = dist.new_group([0, 2], backend="ulysses_shm")
    if rank != 1:
        x = torch.tensor([float(rank)])
        dist.broadcast(x, 2, group=pair)
        found.append(x.tolist())
        dist.destroy_process_group(pair)
    for one in groups[1:]:
        dist.destroy_process_group(one)
    return found


def test_groups_of_shared_memory_in_a_world_of_gloo(gloo: Worlds) -> None:
    found = gloo(WORLD).run(_beside_gloo)
    assert found == [["gloo", True, True, True, *([[2.0]] if rank != 1 else [])] for rank in range(WORLD)]
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"  # ours must be asked for


@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv"])
def test_attention_is_that_of_one_process_in_float64(shm: Worlds, strategy: str) -> None:
    cells = [
        Cell(7, (3, 3), strategy, True, 2, "uneven"),
        Cell(2, (4, 2), strategy, False, 1, "exchanged"),  # a rank without tokens
        Cell(257, (30, 6), strategy, True, 1, "padded"),
        Cell(3000, (8, 1), strategy, True, 1, "uneven"),
        Cell(64, (2, 1), strategy, False, 2, "padded", return_lse=True, dtype=torch.bfloat16),
    ]
    assert_right(cells, shm(WORLD).run(run_cells, cells))


def _mismatches(rank: int, group: Any) -> list[str]:
    def wrong_op() -> None:
        if rank == 0:
            dist.broadcast(torch.ones(2), 0)
        else:
            dist.all_reduce(torch.ones(2))

    def wrong_size() -> None:
        dist.all_reduce(torch.ones(LARGE if rank == 2 else 5))

    def wrong_dtype() -> None:
        dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32))

    def wrong_signature() -> None:
        q = torch.randn(1, 4, 3, 8)
        for is_causal in (False, True, rank == 2):  # both were agreed on before
            ua.ulysses_attention(q, q, q, group, is_causal=is_causal)

    texts = []
    for call in (wrong_op, wrong_size, wrong_dtype, wrong_signature):
        try:
            call()
            texts.append("no error")
        except RuntimeError as error:
            texts.append(str(error))
    x = torch.ones(1)
    dist.all_reduce(x)
    return [*texts, str(x.item())]


def test_cp062_what_does_not_match_is_named_on_every_rank_and_the_group_lives(shm: Worlds) -> None:
    for texts in shm(WORLD).run(_mismatches):
        calls = "rank 0 calls broadcast, rank 1 calls all_reduce, rank 2 calls all_reduce"
        assert_text(texts[0], "CP062", calls, "Nothing was exchanged and the group is still usable")
        assert_text(texts[1], "CP062", f"rank 2 sends {4 * LARGE} bytes to rank 0, which expects 20 bytes")
        assert_text(texts[2], "CP062", "rank 0 has dtype Float, rank 1 has dtype Int")
        # Agreement costs microseconds here, so that it is asked for at every call.
        assert_text(texts[3], "CP060", "ranks disagree on is_causal", "rank 2 has True")
        assert texts[4] == "3.0"


def _mapped(rank: int, group: Any) -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line.split(None, 5)[5].strip() for line in maps if "/dev/shm/ulysses-" in line]


def test_no_name_is_left_in_dev_shm_while_the_ranks_live(shm: Worlds) -> None:
    mapped = shm(WORLD).run(_mapped)
    assert mapped[0] and set(mapped[0]) <= set(mapped[1])
    for name in mapped[0]:
        assert name.endswith(" (deleted)") and not os.path.exists(name.removesuffix(" (deleted)"))


def test_the_doctor_says_the_same_as_over_gloo(shm: Worlds, gloo: Worlds) -> None:
    said = []
    for worlds in (gloo, shm):
        with WorkerRanks("ulysses", worlds=worlds) as ranks:
            report = _C.examine(ranks, select("ulysses", worlds=[WORLD], cases="", quick=True))
        assert ranks.restarts == 0
        said.append([[(case["id"], case["verdict"]) for case in report["cases"]], report["probes"], report["findings"]])
    assert said[0] == said[1]
    assert {verdict for _, verdict in said[0][0]} == {"ok", "refused"} and said[0][2] == []
