"""Runs the proof of every family against the installed version of a library and stores what came out.

Usage: python compat_run.py diffusers|transformers FOLDER
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import pathlib
import sys

import torch

from compat_proof import WORLD, proof_of, run_family
from ulysses_attention.launch import ProcessRanks

TIMEOUT_S = 60.0


def main(library: str, folder: str) -> int:
    """0 unless a family came out wrong or failed."""
    version = importlib.metadata.version(library)
    families, prove = proof_of(library)
    cells = {}
    with ProcessRanks(WORLD, timeout_s=TIMEOUT_S) as world:
        for family in families:
            cells[family] = run_family(world, prove, family)
            numbers = {name: f"{x:.1e}" for name, x in cells[family].items() if isinstance(x, float)}
            print(f"{library} {version} {family}: {cells[family]['verdict']} {cells[family].get('why', '')} {numbers}")
    result = {
        "library": library,
        "version": version,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "families": cells,
    }
    file = pathlib.Path(folder) / f"{library}-{version}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(cell["verdict"] in ("wrong", "failed", "insensitive") for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
