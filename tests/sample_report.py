"""A report of the doctor made by hand: every verdict, one finding, one picture with a wrong block.

Its numbers are invented, except for the picture: shares of uniform attention, in closed form.
"""

from __future__ import annotations

from typing import Any

from ulysses_attention.doctor.schema import Report

SHARDS = [8, 8, 7, 0]  # uneven, and one rank without tokens
SENTENCE = "each rank attends only to its own tokens: keys 0-7 never influence queries 8-22"
HOSTILE = '<b>not bold</b> & "quoted" </td> \x1b[31m'
ROWS: list[tuple[str, str, int, str, str, float | None, str]] = [
    # feature, strategy, cp_size, options, verdict, error, message
    ("equal_shards", "ulysses", 2, "plain", "ok", 1.2e-7, ""),
    ("equal_shards", "ulysses", 4, "plain", "ok", 2.04e-7, ""),
    ("equal_shards", "allgather_kv", 2, "plain", "ok", 1.1e-7, ""),
    ("equal_shards", "allgather_kv", 4, "plain", "wrong", 0.83, "out is off by 0.83, at most 1e-05 is allowed"),
    ("equal_shards", "allgather_kv", 4, "causal", "wrong", 1.13, "out is off by 1.1, at most 1e-05 is allowed"),
    ("equal_shards", "allgather_kv", 4, "one_token", "ok", 3e-8, ""),
    ("uneven_shards", "ulysses", 2, "plain", "ok", 0.0, ""),
    ("uneven_shards", "ulysses", 4, "plain", "crashed", None, f"rank 2: ZeroDivisionError: {HOSTILE}"),
    ("uneven_shards", "allgather_kv", 2, "plain", "ok", 1e-7, ""),
    ("uneven_shards", "allgather_kv", 4, "plain", "hung", None, "rank 1 gave no answer within 5 s"),
    ("fewer_kv_heads_than_ranks", "ulysses", 2, "plain", "unclear_message", None, "every rank: AssertionError: "),
    (
        "fewer_kv_heads_than_ranks",
        "ulysses",
        4,
        "plain",
        "one_rank_only",
        None,
        "rank 0 raised ValueError, 1-3 went on",
    ),
    ("fewer_kv_heads_than_ranks", "allgather_kv", 2, "plain", "ok", 2e-7, ""),
    ("window", "ulysses", 2, "plain", "refused", None, "[attention] window=(4, 0). … Fix: window=None. [CP041]"),
    ("window", "ulysses", 4, "plain", "refused", None, "[attention] window=(4, 0). … Fix: window=None. [CP041]"),
    ("window", "allgather_kv", 2, "plain", "refused", None, "[attention] two: [CP041]; window with lse [CP048]"),
    ("window", "allgather_kv", 4, "plain", "refused", None, "attention() got an unexpected keyword argument 'window'"),
]
PROBES: list[dict[str, Any]] = [
    {"name": "reach", "strategy": "ulysses", "cp_size": 4, "verdict": "ok", "detail": "", "finding": None},
    {
        "name": "reach",
        "strategy": "allgather_kv",
        "cp_size": 4,
        "verdict": "wrong",
        "detail": "keys 0-7 do not reach queries 8-22",
        "finding": 0,
    },
    {
        "name": "linearity",
        "strategy": "allgather_kv",
        "cp_size": 4,
        "verdict": "wrong",
        "detail": "attention of 2 v is not 2 × attention of v",
        "finding": None,
    },
    {
        "name": "heads",
        "strategy": "ulysses",
        "cp_size": 2,
        "verdict": "not_applicable",
        "detail": "one head",
        "finding": None,
    },
]


def _case(row: tuple[str, str, int, str, str, float | None, str]) -> dict[str, Any]:
    feature, strategy, cp_size, options, verdict, error, message = row
    identity = f"{feature}/{strategy}/W{cp_size}/float32/S23-H6:2-{options}"
    wrong = verdict == "wrong"
    return {
        "id": identity,
        "feature": feature,
        "strategy": strategy,
        "cp_size": cp_size,
        "dtype": "float32",
        "backward": True,
        "verdict": verdict,
        "error": error,
        "allowed": 1e-5 if error is not None else None,
        "tensor": "out" if error is not None else "",
        "message": message,
        "tokens": "8-22" if wrong else "",
        "heads": "0-5" if wrong else "",
        "ranks": "1-3" if wrong else "",
        "repro": f'ulysses repro \'{{"target": "my_module:attention", "case": "{identity}"}}\'',
        "finding": 0 if wrong else None,
    }


def _weights(local_only: bool) -> list[list[float | None]]:
    """Uniform causal attention; with local_only a query sees the keys of its own rank alone."""
    rank = [r for r, length in enumerate(SHARDS) for _ in range(length)]
    rows: list[list[float | None]] = []
    for i in range(len(rank)):
        seen = [j <= i and (rank[j] == rank[i] or not local_only) for j in range(len(rank))]
        rows.append([1 / sum(seen) if one else 0.0 for one in seen])
    return rows


def sample() -> Report:
    """A new copy, to be changed at will."""
    cases = [_case(row) for row in ROWS]
    verdicts = ("ok", "refused", "wrong", "crashed", "hung", "one_rank_only", "unclear_message")
    report: Any = {
        "schema_version": 2,
        "library_version": "0.1.0",
        "torch_version": "2.13.0+cpu",
        "kernels": "float32 cpu_flash, bfloat16 cpu_fused",
        "target": "my_module:attention",
        "transport": "threads",
        "worlds": [2, 4],
        "quick": False,
        "seconds": 12.34,
        "strategies": ["ulysses", "allgather_kv"],
        "summary": {verdict: sum(case["verdict"] == verdict for case in cases) for verdict in verdicts},
        "exit_status": 1,
        "cases": cases,
        "probes": [dict(probe) for probe in PROBES],
        "findings": [
            {
                "kind": "local_only",
                "sentence": SENTENCE,
                "point": "2. K and V are global: a query sees the keys of every rank",
                "anchor": "docs/guide.md#the-loss-is-too-high-and-there-is-no-error",
                "cases": [case["id"] for case in cases if case["verdict"] == "wrong"],
            }
        ],
        "pictures": [
            {
                "title": f"reach: strategy {strategy}, 4 ranks, causal",
                "strategy": strategy,
                "cp_size": 4,
                "query_shards": list(SHARDS),
                "key_shards": list(SHARDS),
                "weights": _weights(local_only=strategy == "allgather_kv"),
                "expected": _weights(local_only=False),
            }
            for strategy in ("allgather_kv", "ulysses")
        ],
    }
    return report
