"""The control pages of a run's ranks on this node, found by the ranks' notes: for commands and metrics."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from megatron.fill.errors import ControlError
from megatron.fill.folders import CONTROL
from megatron.fill.pages.control import NAME, ControlPage, Note, read_note


def find_pages(run_dir: Path, known: Sequence[ControlPage] = ()) -> list[ControlPage]:
    """The control pages of a run's ranks that are alive on this node, by rank.

    Those of ``known`` that are still there are returned again: each look at a page maps it until the process ends.
    ControlError if there is no such run folder, no rank is found on this node, or one is another user's.
    """
    if not run_dir.is_dir():
        raise ControlError(f"{run_dir}: no such folder; expected the run folder that the training printed")
    node = os.uname().nodename
    pages = [page for path in notes(run_dir) if (page := _open(path, known)) is not None]
    if not pages:
        others = sorted(path.name for path in (run_dir / CONTROL).glob("*") if path.name != node)
        elsewhere = f"; it has ranks on {', '.join(others)}, and each node has to be told" if others else ""
        unknown = "".join(f"; {what}" for what in damaged_notes(run_dir))
        raise ControlError(f"{run_dir}: none of its ranks runs on this node, {node}{elsewhere}{unknown}")
    return sorted(pages, key=lambda page: page.rank)


def damaged_notes(run_dir: Path) -> list[str]:
    """Error lines, one for each damaged note: the state of its rank is unknown."""
    damaged = []
    for path in notes(run_dir):
        try:
            read_note(path)
        except (FileNotFoundError, PermissionError):  # just removed; reported where it is opened
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            damaged.append(f"{path} is damaged ({reason}), so whether that rank runs, and in which state, is not known")
    return damaged


def notes(run_dir: Path) -> list[Path]:
    """The notes of the run's ranks on this node; a rank that is done has removed its note."""
    return sorted((run_dir / CONTROL / os.uname().nodename).glob("rank*.json"))


def link_of(note: Note, fd: int, name: str) -> str | None:
    """Return the path to open a descriptor of a note's process by; None if it is not a page of that name.

    The pid may be reused by now, and opening another process's pipe or terminal could do harm.  OSError if there is no
    such process or descriptor, or it is another user's.
    """
    link = f"/proc/{note.pid}/fd/{fd}"
    return link if os.readlink(link).startswith(f"/memfd:pipefill-{name}") else None


def _open(path: Path, known: Sequence[ControlPage]) -> ControlPage | None:
    """Open the page that a note names, if it is not a known one; None if that rank is gone or the note is damaged;
    ControlError if the rank belongs to another user.
    """
    try:
        note = read_note(path)
        link = link_of(note, note.fd, NAME)
        if link is None:
            return None
        there = os.stat(link)
        for page in known:
            if os.path.samestat(os.fstat(page.fd), there) and path.name == f"rank{page.rank}.json":
                return page
        fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise ControlError(f"{path}: its rank belongs to another user; only that user may control it") from error
    except (OSError, ValueError):
        return None
    with contextlib.suppress(ControlError):
        page = ControlPage(fd)
        if page.pid == note.pid and path.name == f"rank{page.rank}.json":
            return page
    os.close(fd)
    return None
