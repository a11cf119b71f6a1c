"""The driver's longer actions, where a training ends in the middle of one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.chaos.outside import Outside


@pytest.mark.parametrize("running", [True, False])
def test_an_operator_whose_training_ends_meanwhile_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    said = SimpleNamespace(code=2, output="", errors="none of its ranks runs")
    monkeypatch.setattr("tests.chaos.attacks.command.pipefill", lambda *words: said)
    main = SimpleNamespace(run_dir=tmp_path, training=SimpleNamespace(running=lambda: running))
    injector = SimpleNamespace(until=lambda done, within_s: done())
    deed = Outside(*cast("Any", (main, injector, None, None, tmp_path))).commit("operator")
    if running:
        assert deed is not None
        assert deed.wrong.startswith("status: 2 none of its ranks runs; pause: 2")
    else:
        assert deed is None
