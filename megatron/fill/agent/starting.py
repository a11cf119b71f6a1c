"""The start of a job, in which an exception does not count as the job's failure."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

logger = logging.getLogger("pipefill.agent")


class NotStarted(Exception):
    """A job did not begin, through no fault of its own; the message says why.  No process of it is left."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Turn exceptions of this block into NotStarted.

    Raises:
        NotStarted: the block raised an exception.
    """
    try:
        yield
    except NotStarted:
        raise
    except OSError as error:  # for example a full disk: it may succeed on another rank, or here later
        raise NotStarted(f"it could not be started: {error}") from error
    except Exception as error:
        logger.exception("a job could not be started")
        raise NotStarted(f"it could not be started: {type(error).__name__}: {error}") from error
