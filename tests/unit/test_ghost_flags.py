"""The flags of ghost stages: what they make of Megatron's arguments, and what is refused."""

from __future__ import annotations

import argparse
import functools
import shlex

import pytest

from megatron.fill.errors import ConfigError
from pipefill_patches.ghost_flags import GhostSettings, add_ghost_arguments, asked_for, check_unused

PARALLEL = {"tensor_model_parallel_size": 2, "context_parallel_size": 1, "pipeline_model_parallel_size": 4}
WRONG = """
--fill-real-stage 4 => --fill-real-stage is 4: expected 0 to 3, one of the pipeline's stages
--fill-real-stage -1 => --fill-real-stage is -1: expected 0 to 3
--fill-real-stage 1 --fill-ghost-world-size 12 => --fill-ghost-world-size is 12: expected a multiple of 8
--fill-real-stage 1 --fill-ghost-world-size 0 => --fill-ghost-world-size is 0: expected a multiple of 8
--fill-real-stage 1 --fill-ghost-waits stream => --fill-ghost-waits is 'stream': this run has no CUDA device
--fill-real-stage 1 --fill-ghost-forward-ms 1 => expected both, or none of them
--fill-real-stage 1 --fill-ghost-forward-ms -1 --fill-ghost-backward-ms 1 => --fill-ghost-forward-ms is -1.0: expected
--fill-real-stage 1 --fill-ghost-transfer-ms nan => --fill-ghost-transfer-ms is nan: expected milliseconds, 0 or more
--fill-real-stage 1 --save model => expected no --save
--fill-real-stage 1 --load model => expected no --load
--fill-ghost-transfer-ms 1 => --fill-ghost-transfer-ms without --fill-real-stage
"""


def parsed(flags: str, **other: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_ghost_arguments(parser)
    for flag in ("--save", "--load"):
        parser.add_argument(flag)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    return argparse.Namespace(**vars(parser.parse_args(shlex.split(flags))), **PARALLEL | other)


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_flags_are_refused_with_what_was_expected(monkeypatch, line):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    flags, expected = line.split(" => ")
    args = parsed(flags)
    check = check_unused if args.fill_real_stage is None else functools.partial(GhostSettings.from_args, on_cpu=True)
    with pytest.raises(ConfigError) as refused:
        check(args)
    assert expected in str(refused.value)


def test_a_pipeline_of_one_stage_and_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="expected at least 2 stages"):
        GhostSettings.from_args(parsed("--fill-real-stage 0", pipeline_model_parallel_size=1), on_cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4: expected to be started without torchrun"):
        GhostSettings.from_args(parsed("--fill-real-stage 0"), on_cpu=True)


@pytest.mark.parametrize(
    ("flags", "rank", "world"),
    [
        ("--fill-real-stage 3", 6, 8),
        ("--fill-real-stage 3 --fill-ghost-world-size 64", 48, 64),
        ("--fill-real-stage 3 --fill-ghost-world-size 64 --use-tp-pp-dp-mapping", 6, 64),
    ],
)
def test_the_process_is_a_rank_of_its_stage(monkeypatch, flags, rank, world):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = parsed(flags)
    settings = GhostSettings.from_args(args, on_cpu=False)
    assert (args.rank, args.world_size, args.fake_process_group) == (rank, world, True)
    assert (settings.stage, settings.waits, settings.forward_ns) == (3, "stream", ())


def test_times_are_per_virtual_stage_or_for_all(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    flags = "--fill-real-stage 0 --fill-ghost-forward-ms 1.5 2 --fill-ghost-backward-ms 3 --fill-ghost-transfer-ms 0.25"
    settings = GhostSettings.from_args(parsed(flags), on_cpu=True)
    assert (settings.forward_ns, settings.backward_ns) == ((1_500_000, 2_000_000), (3_000_000,))
    assert (settings.transfer_ns, settings.waits) == (250_000, "host")


def test_who_asks_for_ghosts_is_known_before_the_flags_are_parsed():
    assert asked_for(["--fill-real-stage", "1"])
    assert asked_for(["--fill-real-stage=1"])
    assert not asked_for(["--fill-jobs", "a.yaml"])
