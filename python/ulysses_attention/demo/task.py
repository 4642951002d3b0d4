"""The task: fill in bytes that other copies of the passage, on other ranks, show."""

from __future__ import annotations

import dataclasses
import random

import torch

COPIES = 4  # one per rank
PASSAGE = 32  # bytes
SEQ_LEN = COPIES * PASSAGE
MASK = 256  # token id of a hidden byte
VOCABULARY = 257


@dataclasses.dataclass(frozen=True)
class Batch:
    """Shapes: tokens, targets, hidden [B, SEQ_LEN]; int64, int64, bool. hidden marks the bytes to predict."""

    tokens: torch.Tensor
    targets: torch.Tensor
    hidden: torch.Tensor


def load_text() -> bytes:
    """Prose that every Python installation ships: the help topics, or argparse's source where they were left out."""
    try:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    except ImportError:
        import argparse
        import inspect

        text = inspect.getsource(argparse)
    return " ".join(text.split()).encode("utf-8", "replace")


def make_batch(text: bytes, seed: int, batch: int) -> Batch:
    """`batch` passages, each COPIES times in a row. Every copy hides half of its bytes and shows the others, and
    every byte is hidden in COPIES / 2 copies and shown in the rest."""
    rng = random.Random(seed)
    passages, hidden = [], []
    for _ in range(batch):
        start = rng.randrange(len(text) - PASSAGE)
        passages.append(list(text[start : start + PASSAGE]))
        half = set(rng.sample(range(PASSAGE), PASSAGE // 2))
        other = set(rng.sample(range(PASSAGE), PASSAGE // 2))
        copies = [[at in half for at in range(PASSAGE)], [at not in half for at in range(PASSAGE)]]
        copies += [[at in other for at in range(PASSAGE)], [at not in other for at in range(PASSAGE)]]
        rng.shuffle(copies)
        hidden.append([flag for copy in copies for flag in copy])
    targets = torch.tensor(passages).repeat(1, COPIES)
    mask = torch.tensor(hidden)
    return Batch(targets.masked_fill(mask, MASK), targets, mask)
