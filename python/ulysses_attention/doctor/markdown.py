"""Parts of a page in Markdown: tables, a stranger's text, and messages that cells refer to by number."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Notes", "escaped", "table"]


class Notes:
    """The messages that cells refer to, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        """The number of a message, from 1; the same message has the same."""
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def escaped(text: str) -> str:
    """One line of a stranger's text that Markdown shows as it is."""
    line = " ".join(text.split())
    return "".join(f"\\{char}" if char in "\\`*_{}[]<>|#" else char for char in line)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
