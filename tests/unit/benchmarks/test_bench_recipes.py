"""scripts/benchmarks/bench_recipes.py: bubbles of published configurations by the closed form."""

import pytest

from scripts.benchmarks.bench_recipes import Row, rows, study

TABLES = """# Summary

| System | #-GPUs | Precision | GBS | MBS | Sequence Length | TP | PP | CP | VP | EP |
|--------|--------|-----------|-----|-----|-----------------|----|----|----|----|----|
| DGX-A  | 256    | BF16      | 4096 | 1 | 4096 | 1 | 2 | 1 | 8 | 32 |
| DGX-B  | 64     | BF16      | 256 | 2 | 4096 | 1 | 4 | 1 | n/a | 1 |
| DGX-C  | 8      | BF16      | 512 | 8 | 4096 | 1 | 1 | 1 | n/a | 8 |

| Model | PP |
|-------|----|
| other | 4  |

| System | #-GPUs | Precision | GBS | MBS | Sequence Length | TP | PP | CP | VP | EP |
|--------|--------|-----------|-----|-----|-----------------|----|----|----|----|----|
| DGX-A  | 256    | FP8       | 4096 | 1 | 4096 | 1 | 2 | 1 | 8 | 32 |
"""


def test_every_row_of_a_table_with_the_columns_is_read_and_other_tables_are_not():
    large, small = Row(256, 4096, 1, 1, 2, 1, 8), Row(64, 256, 2, 1, 4, 1, 1)
    assert list(rows(TABLES)) == [large, small, Row(8, 512, 8, 1, 1, 1, 1), large]
    assert (large.microbatches, small.microbatches) == (32, 8)


def test_the_closed_form_is_taken_over_the_rows_with_a_pipeline_as_often_as_they_come():
    found = study(TABLES)
    assert found["summary"]["rows"] == 3
    assert found["summary"]["distinct"] == 2
    assert found["summary"]["median"] == 1 / (8 * 32 + 1)
    assert found["summary"]["largest"] == 3 / (8 + 3)
    assert [(row["stages"], row["count"]) for row in found["rows"]] == [(2, 2), (4, 1)]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [("| 256 | 2 |", "| many | 2 |", "GBS is 'many'"), ("| 256 | 2 |", "| 250 | 2 |", "7.8125 micro-batches")],
)
def test_a_row_that_makes_no_sense_is_named(old, new, says):
    with pytest.raises(ValueError, match=says) as raised:
        study(TABLES.replace(old, new))
    assert "DGX-B" in str(raised.value)


def test_text_without_such_tables_is_refused():
    with pytest.raises(ValueError, match="no row with more than one pipeline stage"):
        study("nothing here")
