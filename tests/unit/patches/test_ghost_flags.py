"""The options of ghost stages: what they make of Megatron's arguments, and what is refused."""

from __future__ import annotations

import argparse

import pytest

from megatron.fill.errors import ConfigError
from pipefill_patches.ghost_flags import GhostSettings, ghost_parser

PARALLEL = {"tensor_model_parallel_size": 2, "context_parallel_size": 1, "pipeline_model_parallel_size": 4}
WRONG = """
--stage 4 => --stage is 4: expected 0 to 3, one of the pipeline's stages
--stage -1 => --stage is -1: expected 0 to 3
--stage 1 --world-size 12 => --world-size is 12: expected a multiple of 8
--stage 1 --world-size 0 => --world-size is 0: expected a multiple of 8
--stage 1 --waits stream => --waits is 'stream': this run has no CUDA device
--stage 1 --forward-ms 1 => expected both, or none of them
"""


def made(options: str, on_cpu: bool = True, **changed: object) -> tuple[argparse.Namespace, GhostSettings]:
    """Megatron's arguments, as changed, and the ghosts' settings."""
    args = argparse.Namespace(**PARALLEL | {"use_tp_pp_dp_mapping": False, "save": None, "load": None} | changed)
    given = ghost_parser().parse_args([*options.split(), "pretrain_gpt.py"])
    return args, GhostSettings.from_args(given, args, on_cpu)


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_options_are_refused_with_what_was_expected(monkeypatch, line):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options, expected = line.split(" => ")
    with pytest.raises(ConfigError) as refused:
        made(options)
    assert expected in str(refused.value)


@pytest.mark.parametrize("flag", ["save", "load"])
def test_nothing_of_it_is_kept(monkeypatch, flag):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=f"expected no --{flag}"):
        made("--stage 1", True, **{flag: "model"})


@pytest.mark.parametrize("times", ["-1", "nan", "much", "", "1,"])
def test_times_are_milliseconds(capsys, times):
    with pytest.raises(SystemExit) as ended:
        ghost_parser().parse_args(["--stage", "1", "--forward-ms", times, "x.py"])
    assert ended.value.code == 2
    assert f"argument --forward-ms: {times!r}: expected milliseconds, 0 or more" in capsys.readouterr().err


def test_a_pipeline_of_one_stage_and_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="expected at least 2 stages"):
        made("--stage 0", pipeline_model_parallel_size=1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 4: expected to be started without torchrun"):
        made("--stage 0")


@pytest.mark.parametrize(
    ("flags", "rank", "world"),
    [
        ("--stage 3", 6, 8),
        ("--stage 3 --world-size 64", 48, 64),
    ],
)
def test_the_process_is_a_rank_of_its_stage(monkeypatch, flags, rank, world):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args, settings = made(flags, on_cpu=False)
    assert (args.rank, args.world_size, args.fake_process_group) == (rank, world, True)
    assert (settings.stage, settings.waits, settings.forward_ns) == (3, "stream", ())
    args, _ = made(flags, on_cpu=False, use_tp_pp_dp_mapping=True)
    assert args.rank == 6


def test_times_are_per_virtual_stage_or_for_all(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    flags = "--stage 0 --forward-ms 1.5,2 --backward-ms 3 --transfer-ms 0.25"
    _, settings = made(flags)
    assert (settings.forward_ns, settings.backward_ns) == ((1_500_000, 2_000_000), (3_000_000,))
    assert (settings.transfer_ns, settings.waits) == (250_000, "host")


def test_what_follows_the_script_is_the_script_s():
    options = ghost_parser().parse_args(["--stage", "1", "pretrain_gpt.py", "--stage", "2", "--fill-jobs", "a.yaml"])
    assert (options.stage, options.script) == (1, "pretrain_gpt.py")
    assert options.arguments == ["--stage", "2", "--fill-jobs", "a.yaml"]


def test_a_transfer_has_one_time(capsys):
    with pytest.raises(SystemExit):
        ghost_parser().parse_args(["--stage", "1", "--transfer-ms", "1,2", "x.py"])
    assert "argument --transfer-ms: '1,2': expected one time in milliseconds" in capsys.readouterr().err
