"""The start of a job, apart from its run: what fails here is not the job's failure."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger("pipefill.agent")


class NotStarted(Exception):
    """A job did not begin, through no fault of its own; the message says why.  Nothing of it is left."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """What is raised in here means that a job was not started.

    Raises:
        NotStarted: instead.
    """
    try:
        yield
    except NotStarted:
        raise
    except OSError as error:  # a full disk, say: another rank may do better, or this one later
        raise NotStarted(f"it could not be started: {error}") from error
    except Exception as error:
        logger.exception("a job could not be started")
        raise NotStarted(f"it could not be started: {type(error).__name__}: {error}") from error
