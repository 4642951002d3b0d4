#!/usr/bin/env python3
"""Checks what the compiler does not: which folder may include which, and the size of files and functions.

Usage: check_layers.py [root]. Prints one line per finding; exit 0 if there is none, else 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

# An arrow means "may include"; what an included folder may include comes with it.
ARROWS: dict[str, set[str]] = {
    "base": set(),
    "contract": {"base"},
    "partition": {"contract"},
    "planner": {"partition"},
    "transports": {"base"},
    "exchange": {"partition"},
    "kernels": {"partition"},
    "strategy": {"exchange", "kernels"},
    "processors": {"strategy"},
    "doctor": {"processors", "planner", "transports"},
    "bindings": {"doctor"},
    # The public header for C++ users, above every folder but the bindings.
    "ulysses.h": {"doctor"},
}
TORCH_FREE = {"base", "contract", "partition", "planner"}
# Strategies and what stands on them see exchange::Group, never c10d.
MAY_SEE_C10D = {"transports", "exchange", "bindings"}
TORCH_INCLUDE = re.compile(r"^(torch|ATen|c10)/")
UMBRELLAS = {"torch/torch.h", "torch/extension.h", "torch/all.h", "ATen/ATen.h"}
# 9 and 5 seconds for everyone who includes our header.
HEAVY = {"torch/csrc/distributed/c10d/ProcessGroup.hpp", "torch/csrc/autograd/custom_function.h"}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FOLDERS = ("src", "tests", "tools", "python", "examples", "scripts", "bench")


def reachable(folder: str) -> set[str]:
    """The folders that `folder` may include, itself too."""
    seen: set[str] = set()
    todo = [folder]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo.extend(ARROWS.get(current, set()))
    return seen


def check_include(folder: str, is_header: bool, quote: str, target: str) -> str | None:
    """What is wrong with one #include of a file in src/ulysses/<folder>, or None."""
    own = re.match(r"ulysses/([^/]+)/", target)
    if own:
        if own.group(1) in reachable(folder):
            return None
        allowed = ", ".join(sorted(reachable(folder)))
        return f"{folder} may not include {target}: allowed folders are {allowed}"
    if quote == '"':
        return f'"{target}" is not of the form "ulysses/<folder>/<file>.h"'
    if not TORCH_INCLUDE.match(target):
        return None
    if folder in TORCH_FREE:
        return f"{folder} is torch-free and may not include <{target}>"
    if target in UMBRELLAS:
        return f"<{target}> is an umbrella header: include ATen/ops/<op>.h or the one header that is needed"
    if is_header and target in HEAVY:
        return f"<{target}> stays out of our headers: declare the type, include it in the .cpp"
    if "/c10d/" in target and folder not in MAY_SEE_C10D:
        return f"{folder} may not include <{target}>: use exchange::Group"
    return None


def check_layers(root: Path) -> Iterator[str]:
    """Every include below src/ulysses that goes against the arrows."""
    source = root / "src" / "ulysses"
    for path in sorted(p for p in source.rglob("*") if p.suffix in {".h", ".cpp"}):
        folder = path.relative_to(source).parts[0]
        if folder not in ARROWS:
            yield f"{path.relative_to(root)}: {folder} is not a known folder: {', '.join(ARROWS)}"
            continue
        text = path.read_text()
        for match in INCLUDE.finditer(text):
            problem = check_include(folder, path.suffix == ".h", match.group(1), match.group(2))
            if problem:
                line = text.count("\n", 0, match.start(1)) + 1
                yield f"{path.relative_to(root)}:{line}: {problem}"


def blank_cpp(text: str) -> str:
    """C++ text with comments, literals and preprocessor lines emptied, line breaks kept."""
    pattern = re.compile(
        r'R"(?P<tag>[^()\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/'
        r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
        re.DOTALL | re.MULTILINE,
    )
    return pattern.sub(lambda m: "\n" * m.group().count("\n"), text)


NOT_A_FUNCTION = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b[^()]*$")
FUNCTION = re.compile(r"\)\s*(const|noexcept|override|final|mutable|&|&&|->[^{}]*|:[^:].*)*\s*$", re.DOTALL)


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """(line of its brace, number of lines) of each outermost function body; a rough reading of braces.

    A body that only returns a braced list is a table: data, whatever its length.
    """
    text = blank_cpp(text)
    head_start = 0
    depth_inside = 0
    first_line = 0
    is_table = False
    for match in re.finditer(r"[{};]", text):
        char = match.group()
        if depth_inside:
            depth_inside += {"{": 1, "}": -1, ";": 0}[char]
            if depth_inside == 0 and not is_table:
                yield first_line, text.count("\n", 0, match.start()) + 2 - first_line
        elif char == "{":
            head = text[head_start : match.start()]
            if FUNCTION.search(head) and not NOT_A_FUNCTION.search(head):
                depth_inside = 1
                first_line = text.count("\n", 0, match.start()) + 1
                is_table = re.match(r"\s*return\s*\{", text[match.end() :]) is not None
        if not depth_inside:
            head_start = match.end()


def python_functions(text: str) -> Iterator[tuple[int, int]]:
    """(first line, number of lines) of each function, without its signature and docstring, which are for the reader."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            before = first.lineno - 1 if ast.get_docstring(node) is None else first.end_lineno
            yield node.lineno, (node.end_lineno or node.lineno) - (before or first.lineno)


def check_sizes(root: Path) -> Iterator[str]:
    """Files over 400 lines and functions over 60."""
    paths = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
    for path in sorted(p for p in paths if p.suffix in {".h", ".cpp", ".py"} and p.is_file()):
        name = path.relative_to(root)
        text = path.read_text()
        count = len(text.splitlines())
        if count > MAX_FILE_LINES:
            yield f"{name}: {count} lines, at most {MAX_FILE_LINES}: split by concept"
        functions = python_functions(text) if path.suffix == ".py" else cpp_functions(text)
        for line, length in functions:
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{line}: function of {length} lines, at most {MAX_FUNCTION_LINES}: split by step"


def main() -> int:
    """Prints every finding."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    findings = [*check_layers(root), *check_sizes(root)]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
