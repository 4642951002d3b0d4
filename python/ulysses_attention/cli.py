"""The `ulysses` command. Every text it prints about the rules comes from the C++ core."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from . import UlyssesContextParallelPolicy


def _policy_field(text: str) -> tuple[str, Any]:
    """field=value with the value read as the type of the field's default."""
    name, sign, value = text.partition("=")
    defaults = dataclasses.asdict(UlyssesContextParallelPolicy())
    if not sign or name not in defaults:
        raise argparse.ArgumentTypeError(f"{text!r} is not field=value with a field of {', '.join(defaults)}")
    default = defaults[name]
    if isinstance(default, bool):
        if value.lower() not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{name}={value}: expected true or false")
        return name, value.lower() == "true"
    if isinstance(default, int):
        try:
            return name, int(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name}={value}: expected an integer") from None
    if isinstance(default, (tuple, list)):
        return name, tuple(part for part in value.split(",") if part)
    return name, value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ulysses", description="Context-parallel attention: rules, guide and demo.")
    commands = parser.add_subparsers(dest="command", required=True)

    check = commands.add_parser(
        "check", help="is a configuration legal; what would be; who owns which tokens and heads"
    )
    check.add_argument("--seq-len", type=int, required=True, help="tokens of the whole sequence")
    check.add_argument("--cp-size", type=int, required=True, help="ranks of the context-parallel group")
    check.add_argument("--heads", type=int, default=1, help="query heads")
    check.add_argument("--kv-heads", type=int, default=None, help="key/value heads (default: as --heads)")
    check.add_argument(
        "--policy",
        type=_policy_field,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a policy field that differs from its default; may be repeated",
    )

    guide = commands.add_parser("guide", help="print the guide as Markdown")
    part = guide.add_mutually_exclusive_group()
    part.add_argument("--errors", action="store_true", help="the list of error ids instead")
    part.add_argument("--table", action="store_true", help="only the table of what is supported")

    demo = commands.add_parser("demo", add_help=False, help="train a small model three ways and compare")
    demo.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _check(options: argparse.Namespace) -> int:
    from . import _C

    policy = UlyssesContextParallelPolicy(**dict(options.policy))
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    text, code = _C.check_report(options.seq_len, options.cp_size, options.heads, kv_heads, policy)
    print(text, end="" if text.endswith("\n") else "\n")
    return int(code)


def _guide(options: argparse.Namespace) -> int:
    from . import _C

    if options.errors:
        text = _C.render_errors()
    elif options.table:
        text = _C.render_capability_table()
    else:
        text = _C.render_guide()
    print(text, end="" if text.endswith("\n") else "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 fine, 1 a problem was found, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:  # the demo parses its own options
        from . import demo

        return demo.main(arguments[1:])
    options = build_parser().parse_args(arguments)
    return _check(options) if options.command == "check" else _guide(options)


if __name__ == "__main__":
    sys.exit(main())
