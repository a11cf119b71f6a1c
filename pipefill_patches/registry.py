"""What a patch is: named targets in an installed package, checked, applied and reverted.

A patch changes the behaviour of pip's ``megatron-core`` in memory; nothing on disk is touched.  It names the versions
it was tested with and the signatures it relies on, and refuses to be applied to anything else, because a patch that
half fits corrupts a training silently.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron.fill.errors import PatchError


@dataclass(frozen=True, slots=True)
class Target:
    """A function of the patched package that a patch relies on.

    Attributes:
        path: ``"package.module:Class.function"``.
        parameters: the parameter names the function must have, in order (a version may add more at the end).
    """

    path: str
    parameters: tuple[str, ...]

    def resolve(self) -> tuple[Any, str]:
        """Return the object that holds the function and the function's name in it.

        Raises:
            PatchError: the module or the attribute is not there.
        """
        module_name, _, dotted = self.path.partition(":")
        *owners, name = dotted.split(".")
        try:
            holder: Any = importlib.import_module(module_name)
            for owner in owners:
                holder = getattr(holder, owner)
            getattr(holder, name)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{self.path} cannot be found: {error}") from error
        return holder, name

    def check(self) -> None:
        """Raise PatchError unless the installed function begins with the expected parameters."""
        holder, name = self.resolve()
        function = inspect.unwrap(getattr(holder, name))
        found = tuple(inspect.signature(function).parameters)
        if found[: len(self.parameters)] != self.parameters:
            raise PatchError(
                f"{self.path} takes ({', '.join(found)}); expected it to begin with ({', '.join(self.parameters)})"
            )


class Patch:
    """One reversible change to the installed ``megatron-core`` (or ``torch``).

    Args:
        name: what the patch is called on the command line and in errors.
        reason: why this seam was chosen, in a sentence.
        install: makes the change; it registers on the given ``ExitStack`` how to take it back.
        targets: the functions relied upon; each is checked before anything is changed.
        package: the distribution whose version is checked.
        versions: the versions of it that the patch was tested with.
    """

    def __init__(
        self,
        name: str,
        reason: str,
        install: Callable[[contextlib.ExitStack], None],
        targets: tuple[Target, ...] = (),
        package: str = "megatron-core",
        versions: str = ">=0.19,<0.20",
    ) -> None:
        self.name = name
        self.reason = reason
        self.targets = targets
        self.package = package
        self.versions = SpecifierSet(versions)
        self._install = install
        self._undo: contextlib.ExitStack | None = None

    @property
    def applied(self) -> bool:
        return self._undo is not None

    def check(self) -> None:
        """Raise PatchError if the installed package is not one that the patch was tested with."""
        try:
            installed = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise PatchError(f"patch {self.name!r} needs {self.package} {self.versions}: it is not installed") from None
        if not self.versions.contains(Version(installed), prereleases=True):
            raise PatchError(
                f"patch {self.name!r} was tested with {self.package} {self.versions}, not with {installed}"
            )
        for target in self.targets:
            try:
                target.check()
            except PatchError as error:
                raise PatchError(f"patch {self.name!r} does not fit {self.package} {installed}: {error}") from error

    def apply(self) -> None:
        """Apply the patch; a second call does nothing.

        Raises:
            PatchError: the installed version or a signature is not the one the patch was written for.  Nothing is
                changed then.
        """
        if self.applied:
            return
        self.check()
        with contextlib.ExitStack() as stack:
            self._install(stack)
            self._undo = stack.pop_all()

    def revert(self) -> None:
        """Take the change back; does nothing when the patch is not applied."""
        if self._undo is not None:
            undo, self._undo = self._undo, None
            undo.close()


_MISSING = object()


def replace(stack: contextlib.ExitStack, holder: Any, name: str, value: Any) -> Any:
    """Set ``holder.name = value`` until the stack is closed; return what was there (None if nothing was)."""
    before = holder.__dict__.get(name, _MISSING) if hasattr(holder, "__dict__") else getattr(holder, name, _MISSING)

    def undo() -> None:
        if before is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, before)

    setattr(holder, name, value)
    stack.callback(undo)
    return None if before is _MISSING else before
