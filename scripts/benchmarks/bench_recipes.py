"""How large are pipeline bubbles in published training configurations?  By the closed form, from tables in Markdown.

Reads the performance tables of a checkout of NVIDIA's Megatron-Bridge (docs/performance-summary.md and
docs/performance-summary-archive.md), takes each row with more than one pipeline stage, and computes
(p - 1) / (v * m + p - 1) (Narayanan et al. 2021).  That is for stages of equal length whose transfers cost nothing:
real bubbles are longer.  Micro-batches are global batch / (micro-batch * data-parallel ranks), data-parallel ranks
GPUs / (TP * PP * CP).  Nothing is downloaded.

    python scripts/benchmarks/bench_recipes.py --json FILE \\
        docs/performance-summary.md docs/performance-summary-archive.md
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.pipeline.bubbles import ideal_bubble_share


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration; the names are those of the tables, and ``virtual`` is 1 where they have none."""

    gpus: int
    global_batch: int
    microbatch: int
    tensor: int
    stages: int
    context: int
    virtual: int

    @property
    def microbatches(self) -> float:
        """Per pipeline and iteration; not a whole number where the table's figures do not divide."""
        ranks = self.gpus / (self.tensor * self.stages * self.context)
        return self.global_batch / (self.microbatch * ranks)

    @property
    def bubble_share(self) -> float:
        return ideal_bubble_share(self.stages, round(self.microbatches), self.virtual)


_COLUMNS = ("#-GPUs", "GBS", "MBS", "TP", "PP", "CP", "VP")


def rows(text: str) -> Iterator[Row]:
    """The rows of all tables in ``text`` that have these columns; other tables are passed over.

    Raises:
        ValueError: a figure is missing, or the micro-batches are no whole number; the message has the row.
    """
    heading: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            heading = []
        elif not heading:
            heading = cells
        elif set(_COLUMNS) <= set(heading) and not set("".join(cells)) <= set(":- "):
            named = dict(zip(heading, cells, strict=True))
            row = Row(*(_number(named[name], line, name) for name in _COLUMNS))
            if row.microbatches < 1 or row.microbatches % 1:
                raise ValueError(f"{row.microbatches} micro-batches; expected a whole number: {line}")
            yield row


def _number(cell: str, line: str, name: str) -> int:
    if name == "VP" and cell.lower() in ("n/a", "none", ""):
        return 1
    found = re.match(r"\d+", cell)
    if not found:
        raise ValueError(f"{name} is {cell!r}; expected a number: {line}")
    return int(found.group())


def study(text: str) -> dict[str, Any]:
    """The distribution of the closed form over the rows with a pipeline, and each distinct row with its count."""
    counted = Counter(row for row in rows(text) if row.stages > 1)
    if not counted:
        raise ValueError("no row with more than one pipeline stage; expected the tables of a performance summary")
    shares = [row.bubble_share for row in counted.elements()]
    return {
        "summary": {
            "rows": len(shares),
            "distinct": len(counted),
            "median": float(np.median(shares)),
            "p90": float(np.percentile(shares, 90)),
            "largest": max(shares),
        },
        "rows": [
            asdict(row) | {"microbatches": int(row.microbatches), "bubble_share": row.bubble_share, "count": count}
            for row, count in sorted(counted.items(), key=lambda item: item[0].bubble_share)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", metavar="FILE.md", type=Path, nargs="+", help="Markdown with performance tables")
    parser.add_argument("--source", default="", help="where the tables are from, for the file's readers")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = study("\n\n".join(path.read_text(encoding="utf-8") for path in options.tables))
    print(json.dumps(found["summary"], indent=2))
    if options.json:
        command = "python scripts/benchmarks/bench_recipes.py " + shlex.join(sys.argv[1:])
        result = {"command": command, "source": options.source, **found}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
