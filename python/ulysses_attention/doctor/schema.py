"""The doctor's report: its fields, their check, and the file. docs/doctor-report.md is rendered from here.

`python -m ulysses_attention.doctor.schema` prints that document.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

SCHEMA_VERSION = 2
_UNIONS = (Union, types.UnionType)  # `X | None` is the one or the other, depending on the Python version

Tensor = Literal[
    "", "out", "lse", "dq", "dk", "dv", "joint_out", "joint_lse", "joint_dq", "joint_dk", "joint_dv", "dmask", "dsinks"
]
Verdict = Literal["ok", "refused", "wrong", "crashed", "hung", "one_rank_only", "unclear_message"]
# One text per verdict, for the document and the legends.
VERDICTS: dict[str, str] = {
    "ok": "every compared tensor is within the bound of float64 attention over the whole sequence",
    "refused": "every rank raised a clear error before any number came back",
    "wrong": "no error, and a tensor is off",
    "crashed": "a rank ended, or raised something that is no refusal",
    "hung": "a rank gave no answer within the time limit",
    "one_rank_only": "some ranks raised and others went on: in a real run these would wait",
    "unclear_message": "every rank raised, but the text does not say what is not supported",
}
CLEAN = ("ok", "refused")


class Case(TypedDict):
    """One call of the target, compared with float64 attention over the whole sequence."""

    id: Annotated[str, "unique: `feature/strategy/W4/dtype/shape-options`"]
    feature: Annotated[str, "row of the matrix, named as in the guide's table"]
    strategy: Annotated[str, "one of the report's strategies"]
    cp_size: Annotated[int, "ranks of this call, one of the report's worlds"]
    dtype: Annotated[str, "of q, k and v"]
    backward: Annotated[bool, "gradients were asked for; false: the forward alone, because backward is refused"]
    verdict: Annotated[Verdict, "see below"]
    error: Annotated[float | None, "largest absolute error against float64; null: nothing to compare, or not finite"]
    allowed: Annotated[float | None, "the bound that error is held against"]
    tensor: Annotated[Tensor, "the tensor with that error; joint_…: of the joint tokens"]
    message: Annotated[str, "empty only for ok: the refusal's text, what is off, or what happened"]
    tokens: Annotated[str, "global tokens that are wrong, as in 8-31; empty: none"]
    heads: Annotated[str, "heads that are wrong"]
    ranks: Annotated[str, "ranks that are wrong, or that did something else than the rest"]
    repro: Annotated[str, "shell line that runs this case alone"]
    finding: Annotated[int | None, "index into findings; null: no finding explains this case"]


class Probe(TypedDict):
    """A property that holds for every attention, tried on one strategy and one number of ranks."""

    name: Annotated[str, "of the property: reach, identity, linearity, …"]
    strategy: Annotated[str, "one of the report's strategies"]
    cp_size: Annotated[int, "ranks, one of the report's worlds"]
    verdict: Annotated[Literal["ok", "wrong", "refused", "not_applicable"], "wrong: the property does not hold"]
    detail: Annotated[str, "one sentence; may be empty unless wrong"]
    finding: Annotated[int | None, "index into findings, or null"]


class Finding(TypedDict):
    """A diagnosis: one sentence that explains several cases or probes."""

    kind: Annotated[str, "a word that stays the same from version to version"]
    sentence: Annotated[str, "the diagnosis"]
    point: Annotated[str, "the point of the guide's checklist that is broken; may be empty"]
    anchor: Annotated[str, "where the guide explains it; may be empty"]
    cases: Annotated[list[str], "ids of the cases it explains"]


class Picture(TypedDict):
    """Which key tokens reach which query tokens. Rows are queries, columns are keys, both in global order."""

    title: Annotated[str, "one line"]
    strategy: Annotated[str, "one of the report's strategies"]
    cp_size: Annotated[int, "ranks, one of the report's worlds"]
    query_shards: Annotated[list[int], "query tokens per rank, 0 allowed"]
    key_shards: Annotated[list[int], "key tokens per rank, 0 allowed"]
    weights: Annotated[list[list[float | None]], "measured share of each key in each query's output; null: not finite"]
    expected: Annotated[list[list[float]], "what weights must be"]


class Summary(TypedDict):
    """Number of cases with each verdict."""

    ok: Annotated[int, "cases"]
    refused: Annotated[int, "cases"]
    wrong: Annotated[int, "cases"]
    crashed: Annotated[int, "cases"]
    hung: Annotated[int, "cases"]
    one_rank_only: Annotated[int, "cases"]
    unclear_message: Annotated[int, "cases"]


class Report(TypedDict):
    """One run of the doctor on one target."""

    schema_version: Annotated[int, "of this format"]
    library_version: Annotated[str, "of ulysses_attention"]
    torch_version: Annotated[str, "of torch"]
    kernels: Annotated[str, "which local kernel our own backend runs on this machine, by dtype; head_dim=64, no mask"]
    target: Annotated[str, "what was examined, as given on the command line"]
    transport: Annotated[Literal["threads", "gloo", "shm", "torchrun"], "what the ranks were"]
    worlds: Annotated[list[int], "numbers of ranks that were tried"]
    quick: Annotated[bool, "true: only a part of the cases was run"]
    seconds: Annotated[float, "of the whole run"]
    strategies: Annotated[list[str], 'strategies that were tried; [""] for a target that has no such choice']
    summary: Annotated[Summary, "counts"]
    exit_status: Annotated[int, "1: a case is neither ok nor refused, or a probe is wrong; else 0"]
    cases: Annotated[list[Case], "below"]
    probes: Annotated[list[Probe], "below"]
    findings: Annotated[list[Finding], "below"]
    pictures: Annotated[list[Picture], "below"]


def finite(value: float) -> float | None:
    """The number as the report holds it: JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def _fields(record: type) -> dict[str, tuple[Any, str]]:
    """Type and description of each field, in order."""
    hints = get_type_hints(record, include_extras=True)
    return {name: (get_args(hint)[0], get_args(hint)[1]) for name, hint in hints.items()}


def _name(hint: Any) -> str:
    """A type as the document and the problems call it."""
    if get_origin(hint) is Literal:
        return ", ".join(json.dumps(value) for value in get_args(hint))
    if get_origin(hint) in _UNIONS:
        return " or ".join(_name(part) for part in get_args(hint))
    if get_origin(hint) is list:
        item = get_args(hint)[0]
        return f"list of ({_name(item)})" if get_origin(item) else f"list of {_name(item)}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", types.NoneType: "null"}
    return names.get(hint) or f"{hint.__name__.lower()}"


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) in _UNIONS:
        return any(_fits(value, part) for part in get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_problems(value: Any, hint: Any, where: str) -> Iterator[str]:
    """Every place of value that is not what hint says."""
    if is_typeddict(hint):
        if not isinstance(value, dict):
            yield f"{where}: {value!r:.60} is no {_name(hint)} with fields"
            return
        fields = _fields(hint)
        yield from (f"{where}: unknown field {name!r}" for name in value if name not in fields)
        for name, (field_hint, _) in fields.items():
            if name in value:
                yield from _type_problems(value[name], field_hint, f"{where}.{name}")
            else:
                yield f"{where}: field {name!r} is missing"
    elif get_origin(hint) is list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _type_problems(item, get_args(hint)[0], f"{where}[{index}]")
    elif get_origin(hint) is list or not _fits(value, hint):
        yield f"{where}: {value!r:.60} is not {_name(hint)}"


def _case_problems(report: Report) -> Iterator[str]:
    seen: set[str] = set()
    for case in report["cases"]:
        where = f"case {case['id']!r}"
        if case["id"] in seen:
            yield f"{where}: id used twice"
        seen.add(case["id"])
        if case["verdict"] != "ok" and not case["message"]:
            yield f"{where}: verdict {case['verdict']!r} without a message"
        if not case["repro"]:
            yield f"{where}: no repro line"
        error, allowed = case["error"], case["allowed"]
        if case["verdict"] == "ok" and error is not None and allowed is not None and error > allowed:
            yield f"{where}: ok, but error={error} is above allowed={allowed}"
    for index, finding in enumerate(report["findings"]):
        for unknown in sorted(set(finding["cases"]) - seen):
            yield f"findings[{index}]: no case has the id {unknown!r}"


def _reference_problems(report: Report) -> Iterator[str]:
    """Indices and names that point at nothing."""
    records: list[tuple[str, Any]] = [(f"case {case['id']!r}", case) for case in report["cases"]]
    records += [(f"probes[{index}]", probe) for index, probe in enumerate(report["probes"])]
    for where, record in records:
        if record["finding"] is not None and not 0 <= record["finding"] < len(report["findings"]):
            yield f"{where}: finding={record['finding']}, but there are {len(report['findings'])} findings"
    records += [(f"pictures[{index}]", picture) for index, picture in enumerate(report["pictures"])]
    for where, record in records:
        if record["strategy"] not in report["strategies"]:
            yield f"{where}: strategy={record['strategy']!r} is not one of {report['strategies']}"
        if record["cp_size"] not in report["worlds"]:
            yield f"{where}: cp_size={record['cp_size']} is not one of the worlds {report['worlds']}"


def _picture_problems(report: Report) -> Iterator[str]:
    for index, picture in enumerate(report["pictures"]):
        where = f"pictures[{index}]"
        for name in ("query_shards", "key_shards"):
            shards = picture[name]
            if len(shards) != picture["cp_size"] or min(shards, default=0) < 0:
                yield f"{where}: {name}={shards} does not give a length for each of {picture['cp_size']} ranks"
        shape = (sum(picture["query_shards"]), sum(picture["key_shards"]))
        for name in ("weights", "expected"):
            rows = picture[name]  # type: ignore[literal-required]
            if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
                yield f"{where}: {name} is not {shape[0]} queries × {shape[1]} keys, the sums of the shards"


def _count_problems(report: Report) -> Iterator[str]:
    """Numbers that must follow from the cases."""
    for verdict, stated in report["summary"].items():
        counted = sum(case["verdict"] == verdict for case in report["cases"])
        if counted != stated:
            yield f"summary.{verdict}={stated}, but {counted} cases have this verdict"
    bad = [case["id"] for case in report["cases"] if case["verdict"] not in CLEAN]
    bad += [f"probe {probe['name']}" for probe in report["probes"] if probe["verdict"] == "wrong"]
    bad += [finding["kind"] for finding in report["findings"]]
    if report["exit_status"] != int(bool(bad)):
        why = f"{bad[0]} is not right" if bad else "nothing is wrong"
        yield f"exit_status={report['exit_status']}, but {why}"


def validate(report: Any) -> list[str]:
    """Every way in which report is not a report of this version, in plain words; empty if it is one."""
    if isinstance(report, dict) and report.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        return [f"schema_version={report['schema_version']!r}, but only version {SCHEMA_VERSION} is known"]
    problems = list(_type_problems(report, Report, "report"))
    if problems:  # the other checks read fields that may be missing
        return problems
    checks = (_case_problems, _reference_problems, _picture_problems, _count_problems)
    return [problem for check in checks for problem in check(report)]


def _refuse_invalid(report: Any, source: str) -> None:
    problems = validate(report)
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  … {len(problems)} in all" if len(problems) > 20 else "")
        raise ValueError(
            f"[doctor report] {source} is not a report of schema version {SCHEMA_VERSION}:\n  {shown}\n"
            f"Fix: a file that this version's `ulysses doctor --json` wrote; the fields are in docs/doctor-report.md"
        )


def dump(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the report: fields in the order of the schema, one line per case, so that two files can be compared.

    Errors: ValueError with every problem that validate() finds; nothing is written then.
    """
    _refuse_invalid(report, "what should be written")

    def ordered(value: Any, hint: Any) -> Any:
        if is_typeddict(hint):
            return {name: ordered(value[name], field_hint) for name, (field_hint, _) in _fields(hint).items()}
        return value

    values: Any = report
    entries = []
    for name, (hint, _) in _fields(Report).items():
        value = values[name]
        item = get_args(hint)[0] if get_origin(hint) is list else None
        if is_typeddict(item) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(ordered(one, item)) for one in value) + "\n ]"
        else:
            text = json.dumps(ordered(value, hint))
        entries.append(f" {json.dumps(name)}: {text}")
    pathlib.Path(path).write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def load(path: str | os.PathLike[str]) -> Report:
    """Read a report. Errors: ValueError if it is not JSON, of another schema version, or breaks validate()."""
    report: Report = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    _refuse_invalid(report, str(path))
    return report


def render_docs() -> str:
    """docs/doctor-report.md."""
    lines = [
        "# The doctor's report as JSON",
        "",
        f"Schema version {SCHEMA_VERSION}. `ulysses doctor TARGET --json F` writes it; a program that reads it refuses "
        "a version that it does not know.",
        "The version grows when a field is added, removed or changes its meaning. Every field is always there.",
    ]
    for record in (Report, Summary, Case, Probe, Finding, Picture):
        lines += [
            "",
            f"## {record.__name__}",
            "",
            record.__doc__ or "",
            "",
            "| field | type | meaning |",
            "|---|---|---|",
        ]
        for name, (hint, meaning) in _fields(record).items():
            lines.append(f"| `{name}` | {'a verdict' if hint is Verdict else _name(hint)} | {meaning} |")
    lines += ["", "## Verdicts", "", "| verdict | meaning |", "|---|---|"]
    lines += [f"| `{verdict}` | {meaning} |" for verdict, meaning in VERDICTS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_docs(), end="")
