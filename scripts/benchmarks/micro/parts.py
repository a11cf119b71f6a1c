"""The parts of the measurement, each with the figures that it finds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron.fill.device.port import MIB
from scripts.benchmarks.micro.actor import Actor, ActorError
from scripts.benchmarks.micro.figures import delays_us, followed_us, spread
from scripts.benchmarks.micro.stage import CAP_BYTES, MPS, TIMESLICE, Stage

WAITS = ("spin", "value", "event")
CONNECTIONS = (8, 1)  # as by default, and as tensor and context parallelism want it
_MARKS = {"posted": False, "written": True}
_FRACTION_BYTES = 4096 * MIB
_RELAY_S = 2.0  # from a relay's start until it hears
_TERMINATE_S = 1.0  # how long a worker's end may take, as agents have it
ACTOR_S = 5.0  # from a process's start until it is ready: torch, a context, warm clocks
_COSTS_S = 1.0  # of ``costs``
_BUBBLE_S = 0.01  # an iteration of ``bubbles``
_LONG_S = 20.0  # a kernel that is killed long before it ends


def least_s(seconds: float, count: int) -> float:
    """The least seconds of all parts, time-sliced and under MPS."""
    heard_s = _RELAY_S + count * _BUBBLE_S
    each_s = {  # of one way to share
        "spinning": ACTOR_S + seconds + len(WAITS) * (seconds + 1),
        "slices": ACTOR_S + seconds / 2 + 2 * seconds + 1,
        "memory": 2 * ACTOR_S,
        "killing": ACTOR_S + 3 * seconds / 2 + _TERMINATE_S,
    }
    marks_s = (len(CONNECTIONS) + 1) * (ACTOR_S + len(_MARKS) * (_COSTS_S + heard_s)) + seconds + _RELAY_S
    return marks_s + 2 * sum(each_s.values())


def marks(stage: Stage, seconds: float, count: int) -> dict[str, Any]:
    """M1: what a mark costs; how long until the relay has heard of it, and until a worker's first kernel is done."""
    found: dict[str, Any] = {}
    for connections in CONNECTIONS:
        with stage.actors(TIMESLICE, "main", "side", connections=connections) as (main, side):
            _both_ready(main, side)
            for way, written in _MARKS.items():
                found[f"{way}, {connections} connections"] = _marked(main, side, count, written)
            if connections == CONNECTIONS[0]:
                main.do("open_gate")
                side.begin("gemm", seconds=seconds + _RELAY_S)  # the relay starts first
                found["beside matrix products"] = _delays(main.do("bubbles", count=int(seconds * 60)))[0]
                side.answer()
    if stage.daemon is not None:
        with stage.actors(MPS, "main", "side") as (main, side):
            _both_ready(main, side)
            for way, written in _MARKS.items():
                found[f"{way}, MPS"] = _marked(main, side, count, written)
    return found


def _marked(main: Actor, side: Actor, count: int, written: bool) -> dict[str, Any]:
    costs = main.do("costs", written=written)
    alone = {"mark_host_us": spread(costs["host_us"]), "mark_stream_us": costs["stream_us"]}
    return alone | _heard(main, side, count, written)


def _heard(main: Actor, side: Actor, count: int, written: bool) -> dict[str, Any]:
    """With a worker that waits at the gate."""
    side.begin("attend", **main.do("open_gate"))
    figures, opened = _delays(main.do("bubbles", count=count, written=written))
    done = side.answer()["done"]
    return figures | {"opened_to_kernel_us": spread(followed_us(opened, done))}


def _delays(told: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    figures = {"mark_to_relay_us": spread(delays_us(told["opened"], told["heard"]))}
    return figures | {"clock_error_us": told["clock_error_us"]}, told["opened"]


def spinning(stage: Stage, seconds: float, count: int) -> dict[str, Any]:
    """M2: what is left of a worker's matrix products beside a rank that waits, by how it waits.

    ``spin``: in a kernel of one block, as NCCL's receives do.  ``value``: in its stream, for a word of host memory.
    ``event``: in its stream, for another stream that waits so.
    """
    found: dict[str, Any] = {}
    for way in stage.ways:
        with stage.actors(way, "main", "side") as (main, side):
            _both_ready(main, side)
            alone = side.do("gemm", seconds=seconds)["per_s"]
            found[way] = {"alone_per_s": alone}
            for wait in WAITS:
                main.begin("wait", how=wait, seconds=seconds + 1)
                time.sleep(0.2)
                beside = side.do("gemm", seconds=seconds)["per_s"]
                waited_s = main.answer()["seconds"]
                found[way][wait] = {"beside_per_s": beside, "share": beside / alone, "waited_s": waited_s}
    return found


def slices(stage: Stage, seconds: float, count: int) -> dict[str, Any]:
    """M3: how long a rank's smallest kernel takes beside a worker's matrix products of 5 ms."""
    found: dict[str, Any] = {}
    for way in stage.ways:
        with stage.actors(way, "main", "side") as (main, side):
            _both_ready(main, side)
            alone = main.do("tiny", seconds=seconds / 2, every_s=0.02)["us"]
            side.begin("gemm", seconds=2 * seconds + 1)
            time.sleep(0.2)
            beside = main.do("tiny", seconds=2 * seconds, every_s=0.02)["us"]
            found[way] = {
                "alone_us": spread(alone),
                "beside_us": spread(beside),
                "product_ms": spread(side.answer()["ms"]),
            }
    return found


def memory(stage: Stage, seconds: float, count: int) -> dict[str, Any]:
    """M4: what a context takes, whether the driver names our processes, and which limits bind."""
    found: dict[str, Any] = {}
    for way in stage.ways:
        with stage.actors(way, "side") as (side,):
            before_bytes = stage.free_bytes()
            facts = side.do("touch")
            asked_us = facts.pop("mem_get_info_us")
            found[way] = facts | {"mem_get_info_us": spread(asked_us), "pid_listed": stage.lists(side.pid)}
            found[way]["context_mib"] = (before_bytes - stage.free_bytes()) / MIB
            if way == MPS:
                found[way]["limit_binds"] = _binds(side, CAP_BYTES)
            else:
                side.do("cap", memory_bytes=_FRACTION_BYTES)
                found[way]["fraction_binds"] = _binds(side, _FRACTION_BYTES)
        with stage.actors(way, "side") as (side,):
            lacking = side.do("confine", folder=str(stage.folder))["lacking"]
            found[way]["landlock"] = {"lacking": lacking, "context": _usable(side)}
    return found


def killing(stage: Stage, seconds: float, count: int) -> dict[str, Any]:
    """M5: the longest that a rank's smallest kernel takes when a worker is killed in the middle of a kernel."""
    found: dict[str, Any] = {}
    for way in stage.ways:
        with stage.actors(way, "main", "side") as (main, side):
            _both_ready(main, side)
            side.begin("spin", seconds=_LONG_S)
            before = main.do("tiny", seconds=seconds / 2, every_s=0.002)["us"]
            main.begin("tiny", seconds=seconds, every_s=0.002)
            time.sleep(seconds / 4)
            if way == MPS and stage.daemon is not None:
                stage.daemon.terminate([side.pid], _TERMINATE_S)  # as a worker is ended
            side.kill()
            found[way] = {"before_us": spread(before), "around_the_kill_us": spread(main.answer()["us"])}
    return found


PARTS: dict[str, Callable[[Stage, float, int], dict[str, Any]]] = {
    "marks": marks,
    "spinning": spinning,
    "slices": slices,
    "memory": memory,
    "killing": killing,
}


def _both_ready(main: Actor, side: Actor) -> None:
    main.begin("touch")
    side.do("touch")
    main.answer()
    for actor in (side, main):  # in turn: each learns how long things take when nobody else is there
        actor.do("ready")


def _binds(side: Actor, cap_bytes: int) -> bool:
    """Whether half of a cap can be had, and four times as much cannot."""
    had = [side.do("allocate", memory_bytes=size)["had"] for size in (cap_bytes // 2, 4 * cap_bytes)]
    return had == [True, False]


def _usable(side: Actor) -> str:
    """Whether it can use the device: ``yes``, or why not."""
    try:
        side.do("touch")
    except ActorError as error:
        return str(error)
    return "yes"
