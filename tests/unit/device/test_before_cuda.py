"""Packages that are installed and broken count as missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fill.device.before_cuda import leave_out_broken


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose part ``pytorch`` does what the test writes into it."""
    name = "an_engine_of_the_test"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    yield str(tmp_path / name / "pytorch.py")
    for module in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[module]


def test_one_that_breaks_counts_as_missing_and_its_error_is_shown(package, capsys):
    Path(package).write_text("raise OSError('libtransformer_engine.so: undefined symbol: x\\nand more')")
    leave_out_broken(["an_engine_of_the_test.pytorch"])
    assert capsys.readouterr().out == (
        "PipeFill: an_engine_of_the_test is installed, but cannot be imported (OSError: libtransformer_engine.so: "
        "undefined symbol: x); it counts as missing\n"
    )
    for name in ("an_engine_of_the_test", "an_engine_of_the_test.pytorch"):
        with pytest.raises(ImportError):
            importlib.import_module(name)


def test_one_that_works_and_one_that_is_not_there_are_left_as_they_are(package, capsys):
    Path(package).write_text("GOOD = 1")
    leave_out_broken(["an_engine_of_the_test.pytorch", "nothing_of_that_name.pytorch"])
    assert importlib.import_module("an_engine_of_the_test.pytorch").GOOD == 1
    assert capsys.readouterr().out == ""
