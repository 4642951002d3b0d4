"""tests/cuda is the proof that the README waits for: collected only where there is a GPU; elsewhere it says so."""

from __future__ import annotations

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("tests/cuda: not run, there is no GPU; CUDA stays unproved")
