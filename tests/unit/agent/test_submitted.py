"""A run that is started anew in its folder does not submit again what it has submitted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.fill.agent.claims import SUBMITTED, forget_submitted, not_yet_submitted, note_submitted
from megatron.fill.errors import FillError
from megatron.fill.work import NewJob, Work

PI = NewJob("pi", Work("m:Pi", args={"points": 5}, search=("/here",)))
E = NewJob("e", Work("m:E"))


def test_what_was_submitted_is_known(tmp_path):
    assert not_yet_submitted(tmp_path, "store", [PI, E]) == [PI, E]
    note_submitted(tmp_path, "store", [PI])
    assert not_yet_submitted(tmp_path, "store", [PI, E]) == [E]
    note_submitted(tmp_path, "store", [E])
    assert not_yet_submitted(tmp_path, "store", [PI, E]) == []


def test_another_spec_or_store_makes_it_another_job_and_another_folder_to_import_from_does_not(tmp_path):
    note_submitted(tmp_path, "store", [PI])
    more = replace(PI, work=replace(PI.work, args={"points": 6}))
    moved = replace(PI, work=replace(PI.work, search=("/there",)))
    assert not_yet_submitted(tmp_path, "store", [PI, more, moved, E]) == [more, E]
    assert not_yet_submitted(tmp_path, "another store", [PI]) == [PI]


def test_all_can_be_forgotten(tmp_path):
    note_submitted(tmp_path, "store", [PI])
    forget_submitted(tmp_path)
    forget_submitted(tmp_path)
    assert not_yet_submitted(tmp_path, "store", [PI]) == [PI]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"version": 2, "jobs": []}', '{"version": 1, "jobs": 3}', "\0"])
def test_a_damaged_note_is_said_and_not_taken_for_an_empty_one(tmp_path, content):
    (tmp_path / SUBMITTED).write_text(content)
    with pytest.raises(FillError, match=r"submitted\.json is not what a run notes"):
        not_yet_submitted(tmp_path, "store", [PI])
