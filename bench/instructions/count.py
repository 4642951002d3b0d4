"""Counts the instructions of a plain Ulysses call outside the local kernel and compares them with baseline.json.

Usage: count.py PROGRAM [--write]. Exit 1 where a call needs over 5 % more than in the baseline; --write stores first.

Two runs of one program differ by less than 0.02 %. Another heap layout, as other code before the call makes it, moves a
number by 1 to 2 %: malloc takes other paths. 5 % leaves room for that twice over, so that what fails is a change of
code.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BASELINE = Path(__file__).with_name("baseline.json")
ALLOWED_RISE = 0.05
CALLS = 100
DUMP = re.compile(r"^desc: Trigger: Client Request: (\w+) (\d+)$.*?^summary: (\d+)$", re.M | re.S)

Counts = dict[str, int]


def per_call(dumps: list[str]) -> Counts:
    """Instructions per call by kind: two run lengths subtracted, so that what does not repeat cancels."""
    totals: dict[str, dict[int, int]] = {}
    for dump in dumps:
        for name, length, instructions in DUMP.findall(dump):
            totals.setdefault(name, {})[int(length)] = int(instructions)
    counts = {}
    for name, by_length in totals.items():
        (short, less), (long, more) = sorted(by_length.items())
        counts[name] = round((more - less) / (long - short))
    return counts


def count(program: str) -> tuple[str, Counts]:
    """What the program was built with, and the instructions per call of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"--callgrind-out-file={folder}/dump"
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", out, program, str(CALLS)], capture_output=True, text=True
        )
        if done.returncode != 0:
            sys.exit(f"bench-instructions: exit {done.returncode}\n{done.stderr[-2000:]}")
        dumps = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
    return done.stdout.strip(), per_call(dumps)


def compare(counts: Counts, baseline: Counts) -> tuple[list[str], bool]:
    """One line per kind of call, and whether none of them rose by more than is allowed or is missing."""
    lines, good = [], set(counts) == set(baseline)
    for name in sorted(set(counts) | set(baseline)):
        now, before = counts.get(name), baseline.get(name)
        if now is None or before is None:
            lines.append(f"{name}: {now} instructions per call, baseline {before}: not in both")
            continue
        rose = now > before * (1 + ALLOWED_RISE)
        good = good and not rose
        verdict = f": more than {ALLOWED_RISE:.0%} above" if rose else ""
        lines.append(f"{name}: {now} instructions per call, baseline {before} ({now / before - 1:+.2%}){verdict}")
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--write", action="store_true", help="store the counts as the new baseline")
    options = parser.parse_args()
    built_with, counts = count(options.program)
    if options.write:
        stored = {"built_with": built_with, "instructions_per_call": counts}
        BASELINE.write_text(json.dumps(stored, indent=2) + "\n")
    baseline = json.loads(BASELINE.read_text())
    if baseline["built_with"] != built_with:
        print(f"the baseline is of {baseline['built_with']}, this is {built_with}: the numbers say little")
    lines, good = compare(counts, baseline["instructions_per_call"])
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
