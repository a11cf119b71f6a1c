"""The ``--fill-*`` group in Megatron's own parser, shown by ``--help`` and checked before training starts."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron.fill.attached import attached
from megatron.fill.config import FillSettings
from megatron.fill.errors import exit_saying
from megatron.fill.given.jobs import JobSpec
from megatron.fill.given.settings import FLAG
from pipefill_patches.patch import Call, Patch, Target, around

ADD = Target("megatron.training.arguments:add_megatron_arguments", ("parser",))
PARSE = Target("megatron.training.arguments:parse_args", ("extra_args_provider", "ignore_unknown_args"))


def add_fill_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the settings, and ``--fill-cpu-backend``, which is evaluated before the flags are parsed."""
    group = parser.add_argument_group("fill", "run other work in the pipeline bubbles (PipeFill)")
    for name, field in FillSettings.flags().items():
        group.add_argument(f"--fill-{name.replace('_', '-')}", help=field.description, **_reading(field))
    group.add_argument(
        FLAG,
        action="append",
        metavar="FILE",
        help="YAML with further settings, such as a site's (user, network, allow, limits of jobs; docs/flags.md lists "
        "them), or the YAML itself: '{network: true}'; may be repeated, later ones win",
    )
    group.add_argument(
        "--fill-cpu-backend",
        action="store_true",
        help="run on the CPU over gloo even where there is a CUDA device (without one, this is what happens anyway); "
        "PIPEFILL_CPU_BACKEND=1 in the environment does the same",
    )
    return parser


def _reading(field: FieldInfo) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a setting of this type."""
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):  # optional
        kind = get_args(kind)[0]
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if kind is bool:
        return {"action": "store_true"}
    how = {"default": field.default, **cast(dict[str, Any], field.json_schema_extra)}
    if get_origin(kind) is Literal:
        return how | {"choices": get_args(kind)}
    if kind == tuple[JobSpec, ...]:
        return how | {"default": None}  # the flag's value is the jobs file
    if get_origin(kind) is tuple:
        return how | {"nargs": "+"}
    return how | ({"type": kind} if kind in (int, float) else {})


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape help texts with an invalid format: one such text of Megatron 0.19 makes all of --help fail."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action) if action.help else None
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def tell_briefly(parser: argparse.ArgumentParser) -> None:
    """Make the parser print an error in one line, once, instead of Megatron's 700 lines of usage on every rank."""

    def error(message: str) -> NoReturn:
        unknown = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        flags = parser._option_string_actions
        close = [found for flag in unknown for found in difflib.get_close_matches(flag, flags, 1)]
        hint = f"did you mean {', '.join(close)}?" if close else "--help lists the flags"
        exit_saying(f"{parser.prog}: error: {message}; {hint}")

    parser.error = error  # type: ignore[method-assign]


def _with_fill(add: Call, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_fill_arguments(add(parser))
    _mend_help(parser)
    tell_briefly(parser)
    return parser


def _checked(parse: Call, /, *args: Any, **kwargs: Any) -> argparse.Namespace:
    parsed = parse(*args, **kwargs)
    if attached.on_parse is not None:
        attached.on_parse(parsed)
    return parsed


def _install(stack: contextlib.ExitStack) -> None:
    around(stack, *ADD.resolve(), _with_fill)
    around(stack, *PARSE.resolve(), _checked)


PATCH = Patch("arguments", _install, (ADD, PARSE))
