"""``pipefill speccheck``: checks that a rule that verifies token trees keeps the target model's distribution."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron.fill.cli.options import Json
from megatron.fill.errors import ConfigError

if TYPE_CHECKING:
    from megatron.fill.wings.llm.speccheck import CheckedRule

_OURS = ("matching", "multi_step", "traversal")


def speccheck(
    rules: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RULE]...", help=f"{', '.join(_OURS)}, or module:function.  [default: all three]"),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option("--draft", metavar="MODULE:FUNCTION", help="How tokens are drawn.  [default: independently]"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the cases that take less than a second each.")] = False,
    as_json: Json = False,
) -> None:
    """Check rules that verify token trees, by listing every outcome of them for small vocabularies.

    A rule is exact if the tokens that it takes are distributed as the target model's own. Its total variation distance
    from that is then 0, except for rounding: below 1e-12. docs/llm.md explains how to write a rule.

    Exits with 0 if all rules are exact, 1 if one is not, 2 if something does not exist or makes no sense.

    --json prints a list with an object per rule and case: rule, case, distance, tokens (of a step, on average), and
    outcomes.
    """
    from megatron.fill.wings.llm import tree, verify
    from megatron.fill.wings.llm.speccheck import cases, check

    named = rules or list(_OURS)
    found = [getattr(verify, name) if name in _OURS else _function("RULE", name) for name in named]
    drawing = tree.drawn if draft is None else _function("--draft", draft)
    results: list[tuple[str, CheckedRule]] = []
    for name, rule in zip(named, found, strict=True):
        for case in cases(quick):
            try:
                results.append((name, check(rule, case, drawing)))
            except Exception as error:  # the user's code may raise anything
                raise ConfigError(
                    f"{name} with {case.name}: {type(error).__name__}: {error}; expected the tokens of a path of the "
                    "tree, and one more"
                ) from error
    if as_json:
        from megatron.fill.cli.views import print_json

        print_json([_as_data(name, checked) for name, checked in results])
    else:
        _print(named, results)
    if not all(checked.exact for _, checked in results):
        raise typer.Exit(1)


def _function(what: str, path: str) -> Any:
    """Import a function of an installed module, or of one in the current folder.

    Raises:
        ConfigError: the function does not exist.
    """
    expected = f"expected {', '.join(_OURS)}, or module:function" if what == "RULE" else "expected module:function"
    if ":" not in path:
        raise ConfigError(f"{what} is {path!r}: {expected}")
    sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} is {path!r}: {error}; {expected}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise ConfigError(f"{what} is {path!r}, a {type(found).__name__}; expected a function")
    return found


def _as_data(name: str, checked: CheckedRule) -> dict[str, Any]:
    return {
        "rule": name,
        "case": checked.case.name,
        "distance": checked.distance,
        "tokens": checked.tokens,
        "outcomes": checked.outcomes,
    }


def _print(names: Sequence[str], results: Sequence[tuple[str, CheckedRule]]) -> None:
    """Print the result of each rule, and its five worst cases that are not exact."""
    for name in dict.fromkeys(names):
        mine = [checked for rule, checked in results if rule == name]
        worst = max(mine, key=lambda checked: checked.distance)
        wrong = [checked for checked in mine if not checked.exact]
        listed = sum(checked.outcomes for checked in mine)
        said = "exact" if not wrong else f"NOT EXACT in {len(wrong)} of {len(mine)} cases"
        print(f"{name}: {said}: distance {worst.distance:.2g} at most, in {len(mine)} cases, {listed:,} outcomes")
        tokens = sum(checked.tokens for checked in mine) / len(mine)
        print(f"  {tokens:.3f} tokens a step on average")
        for checked in sorted(wrong, key=lambda checked: -checked.distance)[:5]:
            print(f"  {checked.case.name}: distance {checked.distance:.3g}")
