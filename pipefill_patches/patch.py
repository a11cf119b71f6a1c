"""Patches: reversible changes of named targets in megatron-core or torch, checked before they are applied.

A patch changes the behaviour of ``megatron-core`` in memory only.  It names the signatures it relies on and refuses to
be applied to any others, because a patch that half fits corrupts a training silently.  The signatures of the imported
code decide; a version that was not tested causes a warning.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron.fill.errors import PatchError
from pipefill_patches.versions import TESTED

logger = logging.getLogger("pipefill")

type Call = Callable[..., Any]  # a function that is patched, or called in its place


@dataclass(frozen=True, slots=True)
class Target:
    """A function of the patched package that a patch relies on."""

    path: str  # ``"package.module:Class.function"``
    parameters: tuple[str, ...]  # its first parameters, in order
    uses: tuple[str, ...] = ()  # globals and attributes that its code must use, because the patch replaces them

    def resolve(self) -> tuple[Any, str]:
        """Return the object that holds the function, and its name there; PatchError if there is none."""
        module, _, dotted = self.path.partition(":")
        owners, _, name = dotted.rpartition(".")
        try:
            owner = pkgutil.resolve_name(f"{module}:{owners}")
            getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{self.path} cannot be found: {error}") from error
        return owner, name

    def check(self) -> None:
        owner, name = self.resolve()
        function = getattr(owner, name)
        function = inspect.unwrap(function.fget if isinstance(function, property) and function.fget else function)
        found = tuple(inspect.signature(function).parameters)
        if found[: len(self.parameters)] != self.parameters:
            raise PatchError(
                f"{self.path} takes ({', '.join(found)}); expected it to begin with ({', '.join(self.parameters)})"
            )
        for name in self.uses:
            if name not in function.__code__.co_names:
                raise PatchError(f"{self.path} does not use {name} any more; expected it to")


def upstream() -> str:
    """Import megatron-core, and return its version and folder; PatchError if it cannot be imported.

    It is not necessarily the one that pip installed.
    """
    try:
        core = importlib.import_module("megatron.core")
        # Its version ends with the commit of the git checkout around it, if there is one; ``public`` is without it.
        version = Version(core.__version__).public
        found = f"megatron-core {version} in {core.__path__[0]}"
    except (ImportError, AttributeError) as error:
        raise PatchError(f"megatron-core cannot be imported: {error}; expected megatron-core{TESTED}") from error
    if not SpecifierSet(TESTED).contains(version, prereleases=True) and os.environ.get("RANK", "0") == "0":
        _warn_untested(found)
    return found


@functools.cache
def _warn_untested(found: str) -> None:
    """Warn once about a version that was not tested; patches that do not fit are refused one by one."""
    logger.warning(
        "PipeFill was tested with megatron-core%s, not with %s: it goes on as far as the signatures fit", TESTED, found
    )


@dataclass(eq=False, repr=False)
class Patch:
    """A reversible change of the imported ``megatron-core`` (or ``torch``)."""

    name: str  # its name on the command line and in errors
    install: Callable[[contextlib.ExitStack], None]  # makes the change, and registers its reversal on the stack
    targets: tuple[Target, ...] = ()  # functions that it relies on, checked before anything is changed

    def __post_init__(self) -> None:
        self._undo: contextlib.ExitStack | None = None

    @property
    def applied(self) -> bool:
        return self._undo is not None

    def check(self) -> None:
        """Raise PatchError, with the signature that differs, unless the patch fits the imported code."""
        upstream()  # warns of a version that was not tested
        for target in self.targets:
            try:
                target.check()
            except PatchError as error:
                raise self._misfit(error) from error

    def apply(self) -> None:
        """Apply the patch, unless it is applied; PatchError if it does not fit, and nothing is changed then."""
        if self.applied:
            return
        self.check()
        with contextlib.ExitStack() as stack:
            try:
                self.install(stack)
            except (ImportError, AttributeError) as error:
                raise self._misfit(error) from error
            self._undo = stack.pop_all()

    def _misfit(self, why: Exception) -> PatchError:
        return PatchError(f"patch {self.name!r} does not fit {upstream()}: {why}; tested is megatron-core{TESTED}")

    def revert(self) -> None:
        if self._undo is not None:
            undo, self._undo = self._undo, None
            undo.close()


_MISSING = object()


def replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set ``owner.name = value`` until the stack is closed."""
    before = owner.__dict__.get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name, _MISSING)

    def undo() -> None:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, value)
    stack.callback(undo)


def wrap(stack: contextlib.ExitStack, owner: Any, name: str, wrapper: Call, *args: Any) -> None:
    """Replace a function by ``wrapper(function, *args)``, which gets its name, until the stack is closed."""
    original = getattr(owner, name)
    replace(stack, owner, name, functools.update_wrapper(wrapper(original, *args), original))


def definers(base: type[Any], name: str) -> list[type[Any]]:
    """Return the class and its subclasses, of those that define ``name`` themselves."""
    kinds = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in kinds if name in vars(kind)]


def around(stack: contextlib.ExitStack, owner: Any, name: str, call: Call, *first: Any) -> None:
    """Have ``call(function, *first, ...)`` called in the place of a function, until the stack is closed.

    For what is called often, ``wrap`` is faster.
    """
    partial = functools.partial(call, getattr(owner, name), *first)
    wrap(stack, owner, name, lambda _: lambda *args, **kwargs: partial(*args, **kwargs))  # a method binds no partial
