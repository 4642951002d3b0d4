"""The doctor's reports of well-known libraries side by side, as docs/peers.md shows them.

`python -m ulysses_attention.doctor.peers_report FOLDER` examines every peer and ours, one report in JSON each into
FOLDER, and prints the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ulysses_attention.doctor import peers
from ulysses_attention.doctor.markdown import Notes, escaped, table
from ulysses_attention.doctor.summary import SEVERITY, WORDS

__all__ = ["main", "render_peers"]

Report = Mapping[str, Any]
Case = Mapping[str, Any]

OURS = "ulysses"
_TOO_SLOW = {"peer:torch/fused"}  # 20 to 50 s for each new shape: it would be shown as hanging

# Column → the features of its cases.
_COLUMNS = {
    "plain": {"equal_shards"},
    "backward": {"equal_shards"},
    "uneven lengths": {"uneven_shards", "empty_shards"},
    "uneven heads": {"uneven_heads", "fewer_heads_than_ranks"},
    "GQA": {"grouped_kv", "fewer_kv_heads_than_ranks"},
    "causal": {"is_causal"},
    "mask": {"attn_mask"},
    "cross lengths": {"cross_lengths"},
    "lse": {"return_lse"},
    "joint text": {"joint_tokens"},
    "dropout": {"dropout"},
    "16-bit": {"equal_shards"},
}
_WORDS = WORDS | {"one_rank_only": "one rank only", "wrong": "**wrong**"}
_SIXTEEN_BIT = {"bfloat16", "float16"}
_GRADIENTS = {"dq", "dk", "dv"}


def render_peers(reports: Mapping[str, Report], versions: Mapping[str, str | None] | None = None) -> str:
    """The page docs/peers.md in Markdown: versions, a row per target and strategy, messages, findings.

    reports:  the doctor's JSON report (schema version 1) by the target's name, in the order of the rows.
    versions: of the libraries by distribution; None asks the environment.
    A cell shows the worst verdict among the cases of its column and, where they differ, how many of them are ok.
    """
    versions = peers.versions() if versions is None else versions
    notes = Notes()
    rows = [
        [label, *(_cell(column, cases, notes) for column in _COLUMNS)]
        for name, report in reports.items()
        for label, cases in _rows_of(name, report)
    ]
    found = [_findings(name, report) for name, report in reports.items()]
    return "\n".join(
        [
            "# Other libraries under the doctor",
            "",
            "Made by `make peers-report`: the same cases for each, on two CPU processes over Gloo, against float64",
            'attention of one process. "refused" is an error that all ranks raise and that says why; "unclear" one',
            'that does not; "crashed" a process that ended; "wrong" a result without an error. A number leads to the',
            "message below. `joint text` keeps the text whole on every rank and puts it in front of the rank's shard.",
            "",
            f"Versions: {_versions(reports, versions)}.",
            "",
            *table(["target", *_COLUMNS], rows),
            "",
            "## Messages",
            "",
            *(f"{number}. {escaped(text)}" for number, text in enumerate(notes.texts, start=1)),
            "",
            "## Findings",
            "",
            *(line for block in found for line in block),
            "",
        ]
    )


def _rows_of(name: str, report: Report) -> list[tuple[str, list[Case]]]:
    """One row per strategy; a function without strategies has one."""
    strategies = report["strategies"]
    return [
        (
            f"`{name}`" if not strategy else f"`{name}`, {strategy}",
            [c for c in report["cases"] if c["strategy"] == strategy],
        )
        for strategy in strategies
    ]


def _cell(column: str, cases: Sequence[Case], notes: Notes) -> str:
    found = _cases_of(column, cases)
    if not found:
        return "not run"
    verdict, message = min(found, key=lambda each: SEVERITY.index(each[0]))
    words = _WORDS[verdict]
    if verdict != "ok" and message:
        words += f" [{notes.number(message)}]"
    num_ok = sum(each == "ok" for each, _ in found)
    return words if num_ok in (0, len(found)) else f"{words}, {num_ok} of {len(found)} ok"


def _cases_of(column: str, cases: Sequence[Case]) -> list[tuple[str, str]]:
    """(verdict, message) of the cases of a column."""
    if column == "backward":
        return [_verdict(c) for c in _plain_cases(cases, False) if c["backward"]]
    if column in ("plain", "16-bit"):
        plain = _plain_cases(cases, column == "16-bit")
        # Where backward is refused, the same case was asked again without.
        forward = {c["id"].removesuffix("-forward") for c in plain if not c["backward"]}
        asked = [c for c in plain if not c["backward"] or c["id"] not in forward]
        # A case whose gradients alone are wrong has a right output.
        return [("ok", "") if column == "plain" and _only_gradients_wrong(c) else _verdict(c) for c in asked]
    return [_verdict(c) for c in cases if c["feature"] in _COLUMNS[column]]


def _plain_cases(cases: Sequence[Case], sixteen_bit: bool) -> list[Case]:
    return [c for c in cases if c["feature"] in _COLUMNS["plain"] and (c["dtype"] in _SIXTEEN_BIT) == sixteen_bit]


def _only_gradients_wrong(case: Case) -> bool:
    return case["verdict"] == "wrong" and case["tensor"] in _GRADIENTS


def _verdict(case: Case) -> tuple[str, str]:
    return case["verdict"], case["message"].strip()


def _findings(name: str, report: Report) -> list[str]:
    sentences = [f"- {escaped(finding['sentence'])}" for finding in report["findings"]]
    return [f"### {name}", "", *(sentences or ["- none"]), ""]


def _versions(reports: Mapping[str, Report], versions: Mapping[str, str | None]) -> str:
    """Ours as the reports say, the libraries' as installed."""
    ours = dict.fromkeys(
        f"ulysses-attention {r['library_version']} (torch {r['torch_version']})" for r in reports.values()
    )
    theirs = [f"{name} {version or 'not installed'}" for name, version in versions.items()]
    return ", ".join([*ours, *theirs])


def main(folder: str) -> int:
    """Examine every peer and ours, then print the page. Errors: ModuleNotFoundError for a peer that is not installed;
    RuntimeError for an examination that left no report."""
    targets = [target for target in peers.targets() if target not in _TOO_SLOW]
    for target in targets:
        peers.load(target)
    reports = {target: _examine(target, Path(folder)) for target in (OURS, *targets)}
    print(render_peers(reports), end="")
    return 0


def _examine(target: str, folder: Path) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{target.replace(':', '-').replace('/', '-')}.json"
    file.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "ulysses_attention.cli",
        "doctor",
        target,
        "--transport",
        "gloo",
        "--world",
        "2",
        "--quick",
    ]
    # What it prints is no part of the page; it exits with 1 where it finds something.
    status = subprocess.run([*command, "--json", str(file)], stdout=sys.stderr, check=False).returncode
    if not file.exists():
        raise RuntimeError(f"[peers-report] target={target!r}: the doctor left no report, exit status {status}")
    report: Report = json.loads(file.read_text())
    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
