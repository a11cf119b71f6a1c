"""``pipefill logs``: prints a job's output."""

from __future__ import annotations

import codecs
import json
import sys
import time
from pathlib import Path
from typing import Annotated

from typer import Option

from megatron.fill.cli.options import JobName, Json, Store, opened
from megatron.fill.console import harmless
from megatron.fill.errors import JobError
from megatron.fill.folders import output_file
from megatron.fill.store import Job
from megatron.fill.untrusted import MOST_BYTES, open_plain

_POLL_S = 0.5


def logs(
    name: JobName,
    store: Store = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Go on until the job has finished.")] = False,
    lines: Annotated[int | None, Option("--lines", "-n", min=0, help="Only the last lines.")] = None,
    as_json: Json = False,
) -> None:
    """Print what a job printed, with control characters made visible.

    --json prints one object per line: job (its name) and line (the text).
    """
    with opened(store) as jobs:
        job = jobs.find(name)
        output = _Output()
        printer = _JsonLines(job.name) if as_json else _Text()
        if not follow and not (job.directory and _path(job).exists()):
            raise JobError(_nothing(job))
        printer.write(_last(output.read(job), lines))
        while follow and not job.state.finished:
            time.sleep(_POLL_S)
            job = jobs.get(job.id)  # before its output is read: the output of a finished job is complete
            printer.write(output.read(job))
        printer.close()


def _path(job: Job) -> Path:
    return output_file(Path(job.directory))


class _Output:
    """A job's growing output; it begins again if the job begins again elsewhere."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._read = 0

    def read(self, job: Job) -> bytes:
        """Return the output since the last call; JobError if it is there and cannot be read, or is no agent's."""
        if not job.directory:
            return b""
        path = _path(job)
        try:
            with open_plain(path) as file:
                size = file.seek(0, 2)
                if size > MOST_BYTES:
                    raise OSError(f"it has {size} bytes, and no agent writes more than {MOST_BYTES}")
                if path != self._path or size < self._read:
                    self._path, self._read = path, 0
                file.seek(self._read)
                data = file.read(MOST_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            reason = error.strerror or error
            raise JobError(f"the output of job {job.name}, {path}, cannot be read: {reason}") from error
        self._read += len(data)
        return data


class _Text:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: bytes, final: bool = False) -> None:
        sys.stdout.buffer.write(harmless(self._decoder.decode(data, final)).encode())
        sys.stdout.buffer.flush()

    def close(self) -> None:
        self.write(b"", final=True)


class _JsonLines:
    def __init__(self, job: str) -> None:
        self._job = job
        self._begun = b""  # the incomplete last line

    def write(self, data: bytes) -> None:
        *whole, self._begun = (self._begun + data).split(b"\n")
        for line in whole:
            print(json.dumps({"job": self._job, "line": line.decode("utf-8", "replace")}), flush=True)

    def close(self) -> None:
        if self._begun:
            self.write(b"\n")


def _last(data: bytes, lines: int | None) -> bytes:
    if lines is None:
        return data
    found = data.splitlines(keepends=True)
    return b"".join(found[max(0, len(found) - lines) :])


def _nothing(job: Job) -> str:
    if not job.directory:
        return f"job {job.name} ({job.id}) is {job.state} and has printed nothing yet; -f waits for it"
    where = f"{job.state}, {job.device}" if job.device else job.state
    return f"job {job.name} ({job.id}) is {where}; its output {_path(job)} is not there, or not on this machine"
