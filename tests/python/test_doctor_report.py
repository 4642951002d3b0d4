"""The doctor's report: its schema, the file, the terminal and the page, on a report made by hand."""

from __future__ import annotations

import copy
import io
import json
import pathlib
import random
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from sample_report import HOSTILE, SENTENCE, SHARDS, sample
from ulysses_attention.doctor import picture, schema, summary, terminal
from ulysses_attention.doctor.html import render_html

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOID = {"meta", "link", "br"}  # the elements of the page that have no end tag
# Closed form for uniform causal attention when each rank sees its own keys alone: a query of rank 1 or 2 misses the
# keys before its shard and gives too much to its own; rank 0 is right.
WRONG_CELLS = sum(query + 1 for query in range(SHARDS[0], sum(SHARDS)))


def set_case(report: Any, **fields: Any) -> None:
    report["cases"][0].update(fields)


BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "missing field": (lambda r: r["cases"][3].pop("dtype"), r"cases\[3\]: field 'dtype' is missing"),
    "unknown field": (lambda r: r["probes"][0].update(sped=1), r"probes\[0\]: unknown field 'sped'"),
    "wrong type": (lambda r: r.update(worlds="2,4"), r"report.worlds: '2,4' is not list of integer"),
    "true is no number": (lambda r: set_case(r, error=True), r"cases\[0\].error: True is not number or null"),
    "not finite": (lambda r: set_case(r, error=float("nan")), r"cases\[0\].error: nan is not number or null"),
    "unknown verdict": (lambda r: set_case(r, verdict="fine"), r"verdict: 'fine' is not \"ok\", \"refused\""),
    "id twice": (lambda r: set_case(r, id=r["cases"][1]["id"]), r"equal_shards/ulysses/W4.*: id used twice"),
    "no message": (lambda r: r["cases"][3].update(message=""), r"verdict 'wrong' without a message"),
    "no repro": (lambda r: set_case(r, repro=""), r"no repro line"),
    "ok above the bound": (lambda r: set_case(r, error=0.5), r"ok, but error=0.5 is above allowed=1e-05"),
    "finding out of range": (lambda r: set_case(r, finding=1), r"finding=1, but there are 1 findings"),
    "finding of no case": (lambda r: r["findings"][0]["cases"].append("x/y"), r"no case has the id 'x/y'"),
    "unknown strategy": (lambda r: r["probes"][0].update(strategy="ring"), r"strategy='ring' is not one of"),
    "unknown world": (lambda r: set_case(r, cp_size=3), r"cp_size=3 is not one of the worlds \[2, 4\]"),
    "count": (lambda r: r["summary"].update(ok=8), r"summary.ok=8, but 7 cases have this verdict"),
    "exit status": (lambda r: r.update(exit_status=0), r"exit_status=0, but equal_shards/allgather_kv/W4"),
    "picture row": (lambda r: r["pictures"][0]["weights"][5].pop(), r"pictures\[0\]: weights is not 23 queries × 23"),
    "picture shards": (lambda r: r["pictures"][0]["key_shards"].pop(), r"key_shards=\[8, 8, 7\] does not give"),
    "no report": (lambda r: r.clear(), r"report: field 'schema_version' is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_report_is_refused_with_the_place(name: str, tmp_path: pathlib.Path) -> None:
    report: Any = sample()
    assert schema.validate(report) == []
    break_it, expected = BROKEN[name]
    break_it(report)
    assert any(re.search(expected, problem) for problem in schema.validate(report)), schema.validate(report)
    path = tmp_path / "report.json"
    with pytest.raises(ValueError, match="is not a report of schema version 2"):
        schema.dump(report, path)
    assert not path.exists()


def test_probes_or_findings_alone_make_the_exit_status_1() -> None:
    report: Any = sample()
    report["cases"] = [case for case in report["cases"] if case["verdict"] in ("ok", "refused")]
    report["summary"] = dict.fromkeys(report["summary"], 0) | {"ok": 7, "refused": 4}
    report["findings"][0]["cases"] = []
    assert schema.validate(report) == []
    for probe in report["probes"]:
        probe.update(verdict="ok", finding=None)
    assert schema.validate(report) == [], "a finding alone is something wrong"
    report["findings"] = []
    assert schema.validate(report) == ["exit_status=1, but nothing is wrong"]


def test_a_dumped_report_loads_as_it_was_in_one_line_per_case(tmp_path: pathlib.Path) -> None:
    report: Any = sample()
    shuffled = dict(reversed(report.items()))
    shuffled["cases"] = [dict(reversed(case.items())) for case in report["cases"]]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    schema.dump(report, paths[0])
    schema.dump(shuffled, paths[1])
    assert schema.load(paths[0]) == report
    assert paths[0].read_bytes() == paths[1].read_bytes()
    lines = paths[0].read_text(encoding="utf-8").splitlines()
    assert sum('"repro"' in line for line in lines) == len(report["cases"])


def test_another_schema_version_is_refused_with_the_known_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema_version": 3, "new": []}))
    with pytest.raises(ValueError, match=r"schema_version=3, but only version 2 is known"):
        schema.load(path)


def test_the_document_is_rendered_from_the_schema() -> None:
    text = (ROOT / "docs" / "doctor-report.md").read_text(encoding="utf-8")
    assert text == schema.render_docs(), "run `make docs`"
    for record in (schema.Report, schema.Case, schema.Probe, schema.Finding, schema.Picture, schema.Summary):
        assert all(f"| `{name}` |" in text for name in record.__annotations__)
    assert set(schema.VERDICTS) == set(schema.Summary.__annotations__) == set(summary.SEVERITY) == set(summary.WORDS)


def test_a_cell_shows_its_worst_verdict() -> None:
    cells = summary.make_matrix(sample()).cells
    texts = {key: cell.text for key, cell in cells.items()}
    assert texts["equal_shards", "ulysses", 4] == "ok 2e-07"
    assert texts["equal_shards", "allgather_kv", 4] == "WRONG 1.1 2/3"
    assert texts["uneven_shards", "allgather_kv", 4] == "hung 5 s"
    assert texts["fewer_kv_heads_than_ranks", "ulysses", 2] == "unclear"
    assert texts["fewer_kv_heads_than_ranks", "ulysses", 4] == "1 rank"
    assert texts["window", "ulysses", 2] == "refused CP041"
    assert texts["window", "allgather_kv", 2] == "refused CP041 +1"
    assert texts["window", "allgather_kv", 4] == "refused"
    assert ("fewer_kv_heads_than_ranks", "allgather_kv", 4) not in texts


def test_a_wrong_case_without_a_number_is_worse_than_any_number() -> None:
    report: Any = sample()
    report["cases"][3]["error"] = None
    cell = summary.make_matrix(report).cells["equal_shards", "allgather_kv", 4]
    assert cell.worst[0] is report["cases"][3]
    assert cell.text == "WRONG 2/3"


def printed(report: Any, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    terminal.print_report(report, console)
    return console.file.getvalue()


def test_the_terminal_says_everything_in_80_columns_without_colour() -> None:
    report: Any = sample()
    text = printed(report)
    assert "\x1b" not in text
    long_lines = [line for line in text.splitlines() if len(line) > 80]
    assert all(line.startswith("ulysses repro ") for line in long_lines), long_lines
    flat = " ".join(text.split())
    for words in ("ok 2e-07", "WRONG 1.1", "crashed", "hung 5 s", "1 rank", "unclear", "refused CP041", SENTENCE,
                  "K and V are global", "docs/guide.md#the-loss-is-too-high-and-there-is-no-error",
                  "WRONG probe linearity", "not 2 × attention"):  # fmt: skip
        assert words in flat, words
    for verdict in ("crashed", "hung", "one_rank_only", "unclear_message"):
        case = next(case for case in report["cases"] if case["verdict"] == verdict)
        assert case["repro"] in text.splitlines()
    assert report["cases"][3]["repro"] in text.splitlines()  # the finding's first
    assert flat.endswith(
        "NOT RIGHT: 2 WRONG, 1 crashed, 1 hung, 1 on one rank only, 1 unclear, 4 refused, 7 ok; 2 probes WRONG (12.3 s)"
    )


@pytest.mark.parametrize("width", [60, 74, 78, 80, 100])
def test_many_ranks_become_several_tables_and_no_word_is_cut(width: int) -> None:
    report: Any = sample()
    assert "allgather_…" not in printed(report, width)
    report["worlds"] = [1, 2, 3, 4, 7, 16]
    for world in (1, 3, 7, 16):
        for strategy in report["strategies"]:
            case = next(c for c in report["cases"] if c["strategy"] == strategy)
            report["cases"].append(case | {"id": f"{case['id']}-{world}", "cp_size": world})
    tables = printed(report, width).split("refused with these words")[0]
    assert "…" not in tables
    assert max(len(line) for line in tables.splitlines()) <= width
    words = tables.split()
    assert [words.count(f"W={world}") for world in (1, 2, 3, 4, 7, 16)] == [2] * 6
    assert words.count("feature") >= 2
    assert words.count("CP041") == 3


def test_a_column_is_a_strategy_above_its_ranks_and_only_where_cases_ran() -> None:
    report: Any = sample()
    report["worlds"] = [2, 4, 8]
    assert summary.make_matrix(report).columns == (
        ("ulysses", 2), ("ulysses", 4), ("allgather_kv", 2), ("allgather_kv", 4))  # fmt: skip
    lines = [line.split() for line in printed(report).splitlines()]
    header = lines.index(["feature", "W=2", "W=4", "W=2", "W=4"])
    assert lines[header - 1] == ["ulysses", "ulysses", "allgather_kv", "allgather_kv"]


def test_each_refusal_stands_once_below_the_table_with_its_words() -> None:
    text = printed(sample())
    said = text.split("refused with these words:")[1].split("Finding 1")[0]
    assert said.count("window=(4, 0)") == 1 and "window" in said and "Fix:" in said


def test_a_right_report_says_so() -> None:
    report: Any = sample()
    report["cases"] = [case for case in report["cases"] if case["verdict"] == "ok"]
    report["summary"] = dict.fromkeys(report["summary"], 0) | {"ok": 7}
    report.update(probes=[], findings=[], exit_status=0)
    assert schema.validate(report) == []
    assert printed(report).splitlines()[-1] == "right: 7 ok (12.3 s)"
    assert "What is wrong" not in render_html(report)


class Page(HTMLParser):
    """The page as elements: their attributes, the texts in document order, and what is not well formed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.problems: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> inside <{'> <'.join(self.open[-3:])}>")
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def paths(self, kind: str) -> list[str]:
        return [a["d"] for tag, a in self.elements if tag == "path" and kind in a.get("class", "").split()]


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    page = Page(render_html(sample()))
    assert page.problems == []
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "iframe", "img", "object", "embed", "base", "form"}
    assert page.all("src") == []
    assert all(link.startswith(("#", "data:")) for link in page.all("href"))
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.all("href") if link.startswith("#")} <= set(ids)
    assert {word for words in page.all("aria-labelledby") for word in words.split()} <= set(ids)
    style = re.search(r"<style>(.*?)</style>", render_html(sample()), re.DOTALL)
    assert style and "url(" not in style.group(1) and "@import" not in style.group(1)
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    policy = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy and policy[0].startswith("default-src 'none';")


def test_the_page_holds_every_case_verdict_sentence_and_repro_line() -> None:
    report: Any = sample()
    page = Page(render_html(report))
    texts = {text.strip() for text in page.texts}
    for case in report["cases"]:
        assert {case["id"], case["repro"], summary.WORDS[case["verdict"]]} <= texts
        assert case["message"].replace("\x1b", "\N{REPLACEMENT CHARACTER}").strip() in texts
    assert {SENTENCE, report["findings"][0]["point"], *schema.VERDICTS.values()} <= texts
    assert {cell.text for cell in summary.make_matrix(report).cells.values()} <= texts
    order = [page.texts.index(text) for text in (SENTENCE, "feature", "How to see it again")]
    assert order == sorted(order)  # the diagnosis comes first


def test_everything_from_the_report_is_escaped() -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: poison(item) for name, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return f"{value}{HOSTILE}" if isinstance(value, str) and value not in schema.VERDICTS else value

    report: Any = poison(sample())
    report["findings"][0]["anchor"] = f"https://example.org/{HOSTILE}"
    text = render_html(report)
    page = Page(text)
    assert page.problems == []
    assert "<b>" not in text and "\x1b" not in text
    assert {tag for tag, _ in page.elements}.isdisjoint({"b"})
    assert '<b>not bold</b> & "quoted" </td>' in "".join(page.texts)
    report["findings"][0]["anchor"] = "javascript:alert(1)"
    assert not [link for link in Page(render_html(report)).all("href") if not link.startswith(("#", "data:"))]


def area(path: str) -> int:
    """Cells that a path of strokes one cell wide covers."""
    return sum(int(length) for length in re.findall(r"h(\d+)", path))


def cells(path: str) -> set[tuple[int, int]]:
    """(query, key) of every cell on a path of relative moves and horizontal strokes."""
    found: set[tuple[int, int]] = set()
    x, y = 0, -0.5
    for dx, dy, length in re.findall(r"m(-?\d+) (-?[\d.]+)h(\d+)", path):
        x, y = x + int(dx), y + float(dy)
        found |= {(int(y), x + k) for k in range(int(length))}
        x += int(length)
    return found


def test_the_picture_marks_the_cells_that_differ_and_draws_the_shards() -> None:
    page = Page(render_html(sample()))
    marked = page.paths("wrong-cells")
    assert len(marked) == 1  # the measured half of the wrong picture alone
    assert area(marked[0]) == WRONG_CELLS
    rank = [r for r, length in enumerate(SHARDS) for _ in range(length)]
    assert cells(marked[0]) == {(q, k) for q in range(23) for k in range(q + 1) if rank[q] > 0}
    assert f"{WRONG_CELLS} cells differ" in "".join(page.texts)
    # Two pictures of two halves; the empty last shard adds no border.
    assert page.paths("shards") == ["M8 0v23M16 0v23M0 8h23M0 16h23"] * 4
    assert page.texts.count("key token") == page.texts.count("query token") == 4
    assert page.texts.count("rank 2") == 8
    assert not {"3", "rank 3"} & set(page.texts)


def test_a_shade_is_a_part_of_the_largest_share_that_must_be() -> None:
    drawing = picture.draw(sample()["pictures"][0])
    measured, expected = drawing.panels
    assert set(expected.shades) == {4}
    assert cells(expected.shades[4]) == {(q, k) for q in range(23) for k in range(q + 1)}
    assert set(measured.shades) == {4, 5}  # too much of its own keys is darker than anything that must be
    assert cells(measured.shades[4]) == {(q, k) for q in range(8) for k in range(q + 1)}
    assert len(cells(measured.shades[5])) == sum(range(1, 9)) + sum(range(1, 8))


def test_a_share_that_is_not_finite_is_wrong() -> None:
    report: Any = sample()
    report["pictures"][1]["weights"][20][3] = None
    assert schema.validate(report) == []
    drawing = picture.draw(report["pictures"][1])
    assert cells(drawing.panels[0].wrong) == {(20, 3)}
    assert drawing.panels[0].outline == "M3 20h1M3 21h1M3 20v1M4 20v1"
    report["pictures"][1]["weights"][22] = [None] * 23
    report["pictures"][1]["weights"][20][3] = report["pictures"][1]["expected"][20][3]
    assert picture.draw(report["pictures"][1]).panels[0].outline == "M0 22h23M0 23h23M0 22v1M23 22v1"


@pytest.mark.parametrize("kind", ["noise", "checkerboard", "local"])
def test_pictures_of_64_by_64_stay_below_100_kb(kind: str) -> None:
    size = 64
    shares = random.Random(0)
    measured = {
        "noise": lambda q, k: shares.random(),
        "checkerboard": lambda q, k: (q + k) % 2 / size,
        "local": lambda q, k: float(q // 16 == k // 16) / 16,
    }[kind]
    report: Any = sample()
    plain_size = len(render_html(report | {"pictures": []}))
    one = copy.deepcopy(report["pictures"][0]) | {"query_shards": [16] * 4, "key_shards": [16] * 4}
    one["weights"] = [[measured(q, k) for k in range(size)] for q in range(size)]
    one["expected"] = [[1 / size] * size for _ in range(size)]
    report["pictures"] = [one]
    assert schema.validate(report) == []
    text = render_html(report)
    drawn = len(text) - plain_size
    assert drawn < (10_000 if kind == "local" else 100_000)
    wrong = sum(abs(w - 1 / size) > picture.WRONG_SHARE for row in one["weights"] for w in row)
    assert area(Page(text).paths("wrong-cells")[0]) == wrong > 0


def test_cross_lengths_and_a_world_without_keys_on_some_ranks() -> None:
    report: Any = sample()
    one = copy.deepcopy(report["pictures"][0]) | {"query_shards": [0, 3, 0, 2], "key_shards": [0, 0, 7, 0]}
    one["weights"] = [[1 / 7] * 7 for _ in range(5)]
    one["expected"] = [[1 / 7] * 7 for _ in range(5)]
    report["pictures"] = [one]
    assert schema.validate(report) == []
    page = Page(render_html(report))
    assert page.problems == []
    assert page.paths("shards") == ["M0 3h7"] * 2
    assert page.paths("wrong-cells") == []
