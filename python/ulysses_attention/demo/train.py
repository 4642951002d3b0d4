"""One training run, on one process or on a group; the runs of the demo differ only in the attention call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F

import ulysses_attention as ua

from .. import launch
from .model import Attend, ByteTransformer, plain_attention
from .task import COPIES, PASSAGE, SEQ_LEN, load_text, make_batch

RUNS = ("single", "ulysses", "local_kv")
WARMUP_STEPS = 20
ADAM_EPS = 1e-5  # 1e-8 would turn rounding into steps where a gradient is nearly 0

Progress = Callable[[int, float], None]  # step, loss


@dataclasses.dataclass(frozen=True)
class Settings:
    """Units: learning_rate per step; batch, passages per step over all ranks together."""

    seed: int = 0
    steps: int = 200
    batch: int = 16
    learning_rate: float = 3e-3


def attention_call(run: str, group: Any, layout: ua.SequenceLayout) -> Attend:
    """The only difference between the runs."""
    if run == "ulysses":
        return cast(Attend, functools.partial(ua.ulysses_attention, cp_group=group, layout=layout))
    return plain_attention  # "single": of the whole sequence; "local_kv": the mistake, of a rank's own tokens only


def train(run: str, rank: int, group: Any, settings: Settings, progress: Progress) -> list[float]:
    """The loss after every step, the same on each rank. group=None: the whole sequence in this process.

    Comm: with a group, one all-reduce of all parameter gradients and two small ones a step, beside the attention's.
    """
    layout = ua.SequenceLayout(SEQ_LEN, COPIES)
    model = ByteTransformer(settings.seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate, eps=ADAM_EPS)
    attend = attention_call(run, group, layout)
    text = load_text()
    places = torch.arange(SEQ_LEN) % PASSAGE

    def own(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return x if group is None else layout.shard(x, rank, dim=dim)

    losses = []
    for step in range(settings.steps):
        batch = make_batch(text, settings.seed * settings.steps + step, settings.batch)
        logits = model(own(batch.tokens), own(places, dim=0), attend)
        hidden = own(batch.hidden)
        total = F.cross_entropy(logits[hidden], own(batch.targets)[hidden], reduction="sum")
        count = own(batch.hidden).sum()
        loss = total / count if group is None else ua.token_mean_loss(total, count, group)
        loss.backward()
        if group is not None:
            ua.sum_gradients(parameters, group)
        losses.append(loss.item())
        for options in optimizer.param_groups:
            options["lr"] = settings.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            progress(step + 1, losses[-1])
    return losses


def _train_in_process(rank: int, group: Any, run: str, settings: Settings) -> list[float]:
    return train(run, rank, group, settings, lambda step, loss: launch.post((step, loss)))


def run_all(settings: Settings, threads: bool, progress: Callable[[str, int, float], None]) -> dict[str, list[float]]:
    """{run: its losses} for RUNS, on COPIES Gloo processes or thread ranks; "single" in this process.

    progress(run, step, loss) is called after every step.
    """
    intra_op = torch.get_num_threads()
    torch.set_num_threads(max(1, intra_op // COPIES))  # as on a rank; tiny tensors gain nothing from more
    try:
        curves = {"single": train("single", 0, None, settings, functools.partial(progress, "single"))}
    finally:
        torch.set_num_threads(intra_op)
    if threads:
        for run in RUNS[1:]:

            def on_rank(rank: int, group: Any, run: str = run) -> list[float]:
                return train(run, rank, group, settings, functools.partial(progress, run))

            curves[run] = ua.run_ranks(on_rank, COPIES)[0]
        return curves
    with launch.ProcessRanks(COPIES, timeout_s=600) as ranks:
        for run in RUNS[1:]:

            def on_post(_: int, value: tuple[int, float], run: str = run) -> None:
                progress(run, *value)

            curves[run] = ranks.run(_train_in_process, run, settings, on_post=on_post)[0]
    return curves
