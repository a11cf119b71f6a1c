"""--fill-free-waits: where it is refused, and how the ranks of a node find each other."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.app import freeing
from megatron.fill.app.freeing import Freed, check_free_waits
from megatron.fill.attached import attached
from megatron.fill.errors import ConfigError, FillError
from megatron.fill.types import RankInfo
from pipefill_patches import defaults

dist = pytest.importorskip("torch.distributed")
INFO = RankInfo(0, 1, 0, 1, 0, 1, 0, 1, device="cuda:0")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"active": False}, "expected --fill-jobs, --fill-store or --fill-report with it"),
        ({"on_cpu": True}, "the training is on the CPU, where a rank that waits leaves its core anyway"),
        ({"through_host": True}, "makes no sense with PIPEFILL_HOST_P2P=1"),
        ({"ring": True}, "expected no --use-ring-exchange-p2p"),
    ],
)
def test_where_it_cannot_act_it_is_refused(changed: dict[str, bool], message: str) -> None:
    usual = {"active": True, "on_cpu": False, "through_host": False, "ring": False}
    asked = usual | changed
    args = Namespace(use_ring_exchange_p2p=asked.pop("ring"))
    with pytest.raises(ConfigError, match=message):
        check_free_waits(args, **asked)
    check_free_waits(Namespace(), active=True, on_cpu=False, through_host=False)


def test_its_patch_is_applied_only_where_it_is_asked_for() -> None:
    assert "free_waits" not in defaults(["pretrain_gpt.py"])
    assert defaults(["pretrain_gpt.py", "--fill-free-waits"])[1] == "free_waits"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ranks_of_a_node_have_each_other_s_pages_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(freeing, "CudaStreams", lambda *asked: made.append(asked))
    freed = Freed(INFO)
    assert attached.waits is not None
    device, own, others = made[0]
    assert (device, others) == ("cuda:0", [])
    assert not Path(own.path).exists()
    freed.end()
    assert attached.waits is None


@pytest.mark.usefixtures("alone")
def test_a_driver_that_refuses_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*asked: Any) -> None:
        raise FillError("the CUDA driver's cuStreamWaitValue32_v2 failed with code 801")

    monkeypatch.setattr(freeing, "CudaStreams", refuse)
    with pytest.raises(FillError, match=r"--fill-free-waits cannot be had, .*: rank 0: .* failed with code 801"):
        Freed(INFO)


@pytest.mark.usefixtures("alone")
def test_a_rank_without_room_for_a_page_takes_part_in_what_all_ranks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []
    real = dist.all_gather_object

    def gather(found: list[Any], mine: Any) -> None:
        gathered.append(mine)
        real(found, mine)

    monkeypatch.setattr(dist, "all_gather_object", gather)

    def full(ranks: int) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(freeing.ReadyPage, "create", full)
    with pytest.raises(FillError, match=r"so ranks wait as NCCL does: rank 0: .*No space left"):
        Freed(INFO)
    assert len(gathered) == 2
    assert attached.waits is None
