"""The `ulysses` command. Every text it prints about the rules comes from the C++ core."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from . import UlyssesContextParallelPolicy


def _true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    """One option per field of the policy, under the field's name, as in `ulysses-check`."""
    group = parser.add_argument_group("policy")
    readers: dict[type, Any] = {bool: _true_or_false, tuple: _names}
    for field in dataclasses.fields(UlyssesContextParallelPolicy):
        shown = ",".join(field.default) if isinstance(field.default, tuple) else str(field.default)
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            type=readers.get(type(field.default), type(field.default)),
            default=field.default,
            metavar="VALUE",
            help=f"default: {shown}",
        )


def _policy(options: argparse.Namespace) -> UlyssesContextParallelPolicy:
    names = [field.name for field in dataclasses.fields(UlyssesContextParallelPolicy)]
    return UlyssesContextParallelPolicy(**{name: getattr(options, name) for name in names})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ulysses", description="Context-parallel attention: rules, guide and demo.")
    commands = parser.add_subparsers(dest="command", required=True)

    check = commands.add_parser(
        "check", help="is a configuration legal; what would be; who owns which tokens and heads"
    )
    check.add_argument("--seq-len", type=int, required=True, help="tokens of the whole sequence")
    check.add_argument("--cp-size", type=int, required=True, help="ranks of the context-parallel group")
    check.add_argument("--heads", type=int, default=None, help="query heads (default: no head columns)")
    check.add_argument("--kv-heads", type=int, default=None, help="key/value heads (default: as --heads)")
    _add_policy_options(check)

    guide = commands.add_parser("guide", help="print the guide as Markdown")
    part = guide.add_mutually_exclusive_group()
    part.add_argument("--errors", action="store_true", help="the list of error ids instead")
    part.add_argument("--table", action="store_true", help="only the table of what is supported, with its tests")

    for name, purpose in (
        ("demo", "train a small model three ways and compare"),
        ("doctor", "what of a backend works, what is refused, what is silently wrong"),
        ("repro", "ask one case of the doctor again"),
    ):
        commands.add_parser(name, add_help=False, help=purpose).add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _check(options: argparse.Namespace) -> int:
    from . import _C

    text, code = _C.check_report(
        options.seq_len, options.cp_size, options.heads, options.kv_heads, _policy(options).text
    )
    print(text, end="" if text.endswith("\n") else "\n")
    return int(code)


def _guide(options: argparse.Namespace) -> int:
    from . import _C

    if options.errors:
        text = _C.render_errors()
    elif options.table:
        text = _C.render_capability_page()
    else:
        text = _C.render_guide()
    print(text, end="" if text.endswith("\n") else "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 fine, 1 a problem was found, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:  # these parse their own options
        from . import demo

        return demo.main(arguments[1:])
    if arguments[:1] in (["doctor"], ["repro"]):
        from .doctor import command, stuck

        status = command.doctor(arguments[1:]) if arguments[0] == "doctor" else command.repro(arguments[1:])
        if argv is None:  # this process is the command
            stuck.leave(status)
        return status
    options = build_parser().parse_args(arguments)
    return _check(options) if options.command == "check" else _guide(options)


if __name__ == "__main__":
    sys.exit(main())
