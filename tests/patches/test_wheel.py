"""pip's wheel has no Makefile: Megatron must not look for it."""

from __future__ import annotations

import subprocess

import pipefill_patches


def test_nothing_is_compiled_that_the_wheel_has(monkeypatch):
    from megatron.core.datasets import utils

    def run(*args: object, **kwargs: object) -> None:
        raise AssertionError("make was called")

    monkeypatch.setattr(subprocess, "run", run)
    original = utils.compile_helpers
    pipefill_patches.PATCHES["wheel"].apply()
    try:
        utils.compile_helpers()
    finally:
        pipefill_patches.PATCHES["wheel"].revert()
    assert utils.compile_helpers is original


def test_it_is_applied_where_the_cpu_backend_is_not(monkeypatch):
    from pipefill_patches import cpu_backend

    monkeypatch.delenv("PIPEFILL_CPU_BACKEND", raising=False)
    monkeypatch.setattr(cpu_backend, "needed", lambda: False)
    assert "wheel" in pipefill_patches.defaults([])
    assert "wheel" not in pipefill_patches.defaults(["--fill-cpu-backend"])
