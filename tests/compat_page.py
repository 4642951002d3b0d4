"""docs/compatibility.md from the results that compat_run and compat_compare stored.

Usage: python compat_page.py FOLDER
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from compat_compare import COLUMNS, TIMEOUT_S
from compat_proof import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, SENSITIVE, Cell
from ulysses_attention.doctor.markdown import Notes, escaped, table

LIBRARIES = ("diffusers", "transformers")
LONGEST = 160  # characters of an error
HEAD = f"""# Which versions and families work

Made by `make compatibility`; a test compares the column of the installed version with a new run of the same proof.
A cell is `ok` if a tiny model with random weights, lengths and heads that do not divide, gives the same numbers on two
Gloo ranks as on one: the output within {OUTPUT_TOLERANCE:.0e} of its largest number, the gradient of every parameter
within {GRADIENT_TOLERANCE:.0e} of its largest (float32), while attention over a rank's own tokens alone would move
the output by more than {SENSITIVE:.0e}. A number leads to a message below.
"""
COMPARED = """## Beside diffusers' own context parallelism

The same models with `enable_parallelism(config=ContextParallelConfig(ulysses_degree=...))` of diffusers {version},
plain and with `ulysses_anything=True`, and with `parallelize`. torch {torch}, Gloo on CPU, two ranks unless said,
{date}. Each run has {seconds:.0f} seconds; one that fails ends its processes, and the next gets new ones. Without a GPU
`enable_parallelism` divides by a device count of 0, which was set to 1 here. Gradients count as right if their sum over
the ranks is, or their mean. Gloo gathers no shards of different length; another transport may.
"""


def short(text: str) -> str:
    """One short line that Markdown shows as it is."""
    line = re.sub(r" at index \d+ \(.*", "", " ".join(text.split()))  # which rank fails first differs
    return escaped(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…")


def cell_text(cell: Cell | None, notes: Notes) -> str:
    if cell is None:
        return "not run"
    if cell["verdict"] == "absent":
        return "not in this version"
    if cell["verdict"] == "wrong" and "why" not in cell:
        wrong = "output" if cell["output_error"] > OUTPUT_TOLERANCE else "gradients"
        return f"wrong {wrong}"
    why = cell.get("why")
    return f"{cell['verdict']} [{notes.number(short(why))}]" if why else str(cell["verdict"])


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def version_table(library: str, results: Sequence[Any], notes: Notes) -> list[str]:
    """One row for each family, one column for each version."""
    runs = sorted(results, key=lambda run: _order(run["version"]))
    families = list(dict.fromkeys(family for run in runs for family in run["families"]))
    rows = [[family, *(cell_text(run["families"].get(family), notes) for run in runs)] for family in families]
    runs_of = ", ".join(f"{run['version']} with torch {run['torch']} on {run['date']}" for run in runs)
    return [f"## {library}", "", f"{runs_of}.", "", *table([library, *(run["version"] for run in runs)], rows), ""]


def column_of(page: str, library: str, version: str) -> dict[str, str]:
    """The cells of a version, by family, without the numbers of messages. Errors: KeyError if there is no column."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    header = next((row for row in rows if row[0] == library), [])
    if version not in header:
        raise KeyError(f"{library} {version}")
    place, start = header.index(version), rows.index(header) + 2
    body = rows[start:]
    end = next(
        (i for i, row in enumerate(body) if len(row) != len(header) or row[0] in (*LIBRARIES, "model")), len(body)
    )
    return {row[0]: row[place].split(" [")[0] for row in body[:end]}


def compare_table(compared: Any, notes: Notes) -> list[str]:
    rows = [
        [row["family"], short(row["what"]), *(cell_text(row["cells"][column], notes) for column in COLUMNS)]
        for row in compared["rows"]
    ]
    return [COMPARED.format(seconds=TIMEOUT_S, **compared), *table(["model", "with", *COLUMNS], rows), ""]


def render(folder: pathlib.Path) -> str:
    notes, lines = Notes(), [HEAD]
    for library in LIBRARIES:
        results = [json.loads(file.read_text()) for file in folder.glob(f"{library}-*.json")]
        lines += version_table(library, results, notes) if results else []
    lines += compare_table(json.loads((folder / "compare-diffusers.json").read_text()), notes)
    lines += ["## Messages", "", *(f"{number}. {text}" for number, text in enumerate(notes.texts, start=1)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(render(pathlib.Path(sys.argv[1])), end="")
