"""Loads the C++ core, or says why it cannot be loaded."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"


def minor(version: str) -> str:
    """'2.13.0+cpu' → '2.13': the part of torch's version that its C++ interface is tied to."""
    return ".".join(version.split("+")[0].split(".")[:2])


def version_problem(built_for: str, installed: str) -> str | None:
    """The error text if a core built for one torch meets another, else None."""
    if minor(built_for) == minor(installed):
        return None
    return (
        f"[ulysses_attention] this build is for torch {built_for}, and torch {installed} is installed. The C++ "
        f"interface of torch changes with each minor version. Fix: pip install 'torch=={minor(built_for)}.*', or build "
        f"again against the installed torch: pip install --no-build-isolation --force-reinstall --no-deps "
        f"ulysses-attention. [CP070]"
    )


def load_core() -> None:
    """Import the C++ core. Errors: ImportError with CP070 for another torch than the one it was built for."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ImportError("[ulysses_attention] torch is not installed. Fix: pip install torch") from error

    built_for = importlib.import_module("ulysses_attention._built_for")
    problem = version_problem(built_for.TORCH_VERSION, torch.__version__)
    if problem is not None:
        raise ImportError(problem)
    importlib.import_module("ulysses_attention._C")
