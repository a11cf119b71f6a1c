"""A Parquet file written in parts, so that an interrupted job neither loses nor duplicates a row."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.linux.files import replacing
from megatron.fill.sidetask.models import need


class ParquetFile:
    """A Parquet file whose rows are written, ``part_rows`` at a time, as files in ``<path>.parts``.

    A part always holds the same rows, so writing it a second time changes nothing.  ``assemble`` appends the parts, one
    per call, to a temporary file, which is then renamed.
    """

    def __init__(self, path: Path, part_rows: int) -> None:
        self._arrow, self._parquet = need("pyarrow"), need("pyarrow.parquet")
        self.path, self._part_rows = path, part_rows
        self._parts = path.with_name(path.name + ".parts")
        self.rows: dict[str, list[Any]] = {}  # rows that are not in a part yet, by column
        self._part = 0  # number of the next part to write
        self._seen = self._assembled = 0
        self._schema: Any = None  # of all parts that were seen
        self._writer: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"rows": {name: list(values) for name, values in self.rows.items()}, "part": self._part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state; TaskError if parts that were written are missing."""
        self.rows, self._part = dict(state["rows"]), state["part"]
        if self._part and not self._parts.exists() and not self.path.exists():
            raise TaskError(f"{self._parts} is missing: expected the {self._part} parts written before")

    @property
    def complete(self) -> bool:
        """True if the file was assembled, before or after the state that was loaded."""
        return self._part > 0 and self.path.exists() and not self._part_path(0).exists()

    def add(self, columns: dict[str, list[Any]]) -> None:
        """Append rows, and write every part that is full."""
        for name, values in columns.items():
            self.rows.setdefault(name, []).extend(values)
        while self._waiting() >= self._part_rows:
            self._write_part()

    def assemble(self) -> bool:
        """Append the next part, after the last row was added; return True if the file is complete."""
        if self.complete:
            shutil.rmtree(self._parts, ignore_errors=True)
            return True
        if self._waiting():
            self._write_part()
            return False
        if self._seen < self._part:  # a column may be empty, or whole numbers, in one part and not in another
            found = self._parquet.read_schema(self._part_path(self._seen))
            self._schema = self._arrow.unify_schemas([self._schema or found, found], promote_options="permissive")
            self._seen += 1
            return False
        scratch = self.path.with_name(self.path.name + ".part")
        table = self._parquet.read_table(self._part_path(self._assembled))
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(scratch, self._schema)
        self._writer.write_table(table.cast(self._schema))
        self._assembled += 1
        if self._assembled < self._part:
            return False
        self._writer.close()
        os.replace(scratch, self.path)
        self._part_path(0).unlink()  # at once it is complete, whatever a kill leaves of the other parts
        return self.assemble()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _waiting(self) -> int:
        return len(next(iter(self.rows.values()), []))

    def _part_path(self, number: int) -> Path:
        return self._parts / f"{number:06d}.parquet"

    def _write_part(self) -> None:
        arrow, count = self._arrow, self._part_rows
        columns = {name: _column(arrow, values[:count]) for name, values in self.rows.items()}
        with replacing(self._part_path(self._part)) as temporary:
            self._parquet.write_table(arrow.table(columns), temporary)
        self.rows = {name: values[count:] for name, values in self.rows.items()}
        self._part += 1


def _column(arrow: Any, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, list) and first and isinstance(first[0], float):
        return arrow.array(values, arrow.list_(arrow.float32()))
    return arrow.array(values)
