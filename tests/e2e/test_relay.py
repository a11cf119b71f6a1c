"""A real two-rank training whose bubbles go through ring, semaphore and relay, beside a listener in the rank itself.

On the CPU the host is the device, so both must see the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.fill.records.rank import read_rank
from megatron.fill.types import PIPELINE_KINDS, CycleKey
from tests.e2e.training import ROOT, SCRIPT, train

RELAYED = f"""
import os, runpy, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import pipefill_patches
from megatron.fill.attached import attached
from megatron.fill.hooks import bus
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.rule import FillRule
from megatron.fill.rank.spec import RankSpec
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.relay import RelayProcess, RelaySpec
from megatron.fill.rank.stream import StreamListener
from megatron.fill.pages.ring import Ring
from tests.support.fake_stream import HostStream
from tests.support.segments import write_rank

FOLDER = Path(__file__).parent


class Both:
    def __init__(self, *listeners):
        self.listeners = listeners
    def __getattr__(self, name):
        return lambda *args: [getattr(listener, name)(*args) for listener in self.listeners]


def on_start(info, args):
    global recorder, relay, relayed
    recorder, ring = Recorder(info, 3), Ring()
    spec = RelaySpec(RankSpec(info, str(FOLDER / f"relay{{info.rank}}.json"), FillRule()), os.getpid(), ring.fd)
    relay = RelayProcess(spec, ring, None, FOLDER / f"relay{{info.rank}}.log")
    assert relay.wait_ready()
    relayed = StreamListener(ring, HostStream(ring.semaphore), lambda: 7, relay.alive, relay.shut)
    # The rank's own first: so the relay is always the later one.
    bus.listener = Both(RankListener(None, recorder, BubblePredictor(FillRule()), lambda: 7), relayed)


attached.on_start = on_start
pipefill_patches.apply(pipefill_patches.defaults(sys.argv))
runpy.run_path({str(ROOT / SCRIPT)!r}, run_name="__main__")
assert bus.listener is not None
relayed.end()
assert relay.finish()
write_rank(FOLDER / f"host{{recorder.info.rank}}.json", recorder.record())
"""


INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1 --microbatch-group-size-per-virtual-pipeline-stage 4"


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [("", CycleKey("1f1b", 4)), (INTERLEAVED, CycleKey("interleaved", 4, 2, group_size=4))],
    ids=["1f1b, batched", "interleaved, overlapped"],
)
def test_the_relay_sees_what_a_listener_in_the_rank_sees(tmp_path: Path, flags: str, schedule: CycleKey):
    script = tmp_path / "relayed.py"
    script.write_text(RELAYED, encoding="utf-8")
    train(tmp_path, f"{flags} --global-batch-size 8", iterations=4, script=(str(script),))
    for rank in range(2):
        relayed, host = (read_rank(tmp_path / f"{of}{rank}.json") for of in ("relay", "host"))
        bubbles = [[one for one in record.bubbles if one.kind in PIPELINE_KINDS] for record in (relayed, host)]
        assert len(bubbles[0]) == len(relayed.bubbles)  # it leaves waits outside the pipeline out
        assert relayed.info == host.info
        assert relayed.schedule == host.schedule == schedule
        assert [one.iteration for one in relayed.iterations] == [one.iteration for one in host.iterations]
        keys = [[(one.iteration, one.index, one.kind) for one in its] for its in bubbles]
        assert keys[0] == keys[1]
        assert keys[0]
        assert [(one.name, one.iteration) for one in relayed.spans] == [(one.name, one.iteration) for one in host.spans]
        pairs = zip(*bubbles, strict=True)
        assert all(ours.start_ns > theirs.start_ns for ours, theirs in pairs)
