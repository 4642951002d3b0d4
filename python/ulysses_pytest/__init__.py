"""The pytest plugin of ulysses_attention: the option --ulysses-cases. The tests are made by
ulysses_attention.pytest_plugin.ulysses_conformance.

pytest imports this module in every run of an environment that has the package, so it imports pytest alone.
PYTEST_DONT_REWRITE: there is no assert here, and ulysses_attention may have imported it already.
"""

from __future__ import annotations

import fnmatch

import pytest

ITEM = "ulysses_item"  # the parameter by which the items of ulysses_conformance are known


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ulysses").addoption(
        "--ulysses-cases",
        metavar="GLOB",
        help="of the tests that ulysses_conformance makes, run those whose id matches: 'is_causal/*', 'probe/reach/*'",
    )


def matches(item_id: str, glob: str) -> bool:
    """The doctor's rule: "*" and "?" as in a shell, anything else for itself, over the whole id."""
    return fnmatch.fnmatchcase(item_id, glob.replace("[", "[[]"))


def _is_left_out(item: pytest.Item, glob: str) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return ITEM in params and not matches(params[ITEM].id, glob)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    glob = config.getoption("--ulysses-cases")
    if glob is None:
        return
    left_out = [item for item in items if _is_left_out(item, glob)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_left_out(item, glob)]
