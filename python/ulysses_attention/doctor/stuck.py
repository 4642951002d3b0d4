"""Threads that never came back from a target: they would wake in an interpreter that is gone, and crash the process."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["leave", "note"]

_threads = 0  # of this process, in all its examinations


def note(ranks: Any) -> int:
    """Remember the threads that these ranks leave behind; how many they are. Ranks that are processes leave none."""
    global _threads
    found: int = getattr(ranks, "stuck_threads", 0)
    _threads += found
    return found


def leave(status: int) -> None:
    """End the process with this exit status, at once, if there are such threads. What was written is flushed."""
    if _threads:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
