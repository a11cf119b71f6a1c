"""Profiles of jobs (configurations, nodes) and bubble cycles of ranks, the inputs of planning.

They are frozen and torch-free values with a JSON form.  Times are nanoseconds (``_ns``), memory is in bytes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from megatron.fill.types import BubbleKind

_LEAST_AMOUNT, _MOST_AMOUNT = 1e-100, 1e100
_MOST_NODES = 1 << 16
_MOST_NODE_NS = 10**13  # almost three hours: the sum over all nodes fits into 62 bits
_MOST_NODE_BYTES = 1 << 60


def is_amount(value: object) -> bool:
    """True if the value is a usable amount of work: 0, or in a range where sums and ratios stay finite."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (value == 0 or _LEAST_AMOUNT <= value <= _MOST_AMOUNT)  # type: ignore[operator]


def whole(value: Any, most: int, what: str) -> int:
    """Return the value; ValueError unless it is a whole number from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {value!r:.40}; expected a whole number from 0 to {most}")
    return value


class Offload(StrEnum):
    """The state that a job keeps in host memory while its node does not need it (PipeFill, section 4.2)."""

    NONE = "none"
    OPTIMIZER = "optimizer"  # the optimizer's state
    WEIGHTS = "weights"  # the optimizer's state and the weights


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to run a job; the results are the same in all of them.

    Its text form is ``b8``, ``b8+checkpointing``, ``b8+offload-optimizer``, ``b8+checkpointing+offload-weights``,
    ``b8+chunk64``.
    """

    batch_size: int = 1  # samples that pass through the model at a time; for training the microbatch
    checkpointing: bool = False  # True if activations are recomputed in the backward pass instead of kept
    offload: Offload = Offload.NONE  # state kept in host memory
    chunk: int = 0  # tokens of prompts that pass through a language model at a time; 0 for other jobs

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.chunk < 0:
            raise ValueError(
                f"batch_size is {self.batch_size}, chunk {self.chunk}; expected at least 1, and at least 0"
            )

    def __str__(self) -> str:
        parts = [f"b{self.batch_size}"]
        if self.checkpointing:
            parts.append("checkpointing")
        if self.offload is not Offload.NONE:
            parts.append(f"offload-{self.offload}")
        if self.chunk:
            parts.append(f"chunk{self.chunk}")
        return "+".join(parts)

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Parse the text form; ValueError if it is none."""
        match = re.fullmatch(r"b(\d+)(\+checkpointing)?(?:\+offload-(optimizer|weights))?(?:\+chunk(\d+))?", text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a configuration; expected such as b8 or b8+checkpointing+offload-optimizer"
            )
        return cls(int(match[1]), match[2] is not None, Offload(match[3] or "none"), int(match[4] or 0))


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """A node of a job's linear list: the smallest unit that runs at a time."""

    name: str
    duration_ns: int  # its duration alone
    memory_bytes: int  # peak device memory of the whole job while it runs

    def __post_init__(self) -> None:
        if self.duration_ns < 0 or self.memory_bytes < 0:
            raise ValueError(f"node {self.name!r}: expected no negative duration or memory; got {self}")


@dataclass(frozen=True, slots=True)
class JobProfile:
    """A job's nodes in order, measured in one configuration; a pass over all of them does ``work``, in its unit."""

    configuration: Configuration
    nodes: tuple[NodeProfile, ...]
    work: float

    def __post_init__(self) -> None:
        if not self.nodes or self.work <= 0:
            raise ValueError(f"{self.configuration}: expected nodes and work; got {len(self.nodes)} and {self.work}")

    @property
    def duration_ns(self) -> int:
        return sum(node.duration_ns for node in self.nodes)

    @property
    def memory_bytes(self) -> int:
        return max(node.memory_bytes for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "configuration": str(self.configuration),
            "work": self.work,
            "nodes": [asdict(node) for node in self.nodes],
        }

    @classmethod
    def from_dict(cls, data: Any) -> JobProfile:
        """Return the profile from the data of ``to_dict``, which a job may have written; ValueError if it is none."""
        try:
            configuration, work, entries = Configuration.parse(data["configuration"]), data["work"], data["nodes"]
            if not isinstance(entries, list) or not 1 <= len(entries) <= _MOST_NODES:
                raise ValueError(f"{configuration}: expected a list of 1 to {_MOST_NODES} nodes")
            if not is_amount(work):
                raise ValueError(f"{configuration}: work is {work!r:.40}; expected a number above 0")
            nodes = tuple(_node(entry) for entry in entries)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not the profile of a job: {type(error).__name__}: {error}") from error
        if not any(node.duration_ns for node in nodes):
            raise ValueError(f"{configuration}: all nodes take 0 ns; expected a measured profile")
        return cls(configuration, nodes, float(work))


def profiles_from_list(entries: Any) -> tuple[JobProfile, ...]:
    """Return a job's profiles from a list of their data; ValueError if one is none, or two have one configuration."""
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"found {entries!r:.40}, which is no list of profiles")
    found: dict[Configuration, JobProfile] = {}
    for profile in map(JobProfile.from_dict, entries):
        if found.setdefault(profile.configuration, profile) is not profile:
            raise ValueError(f"two of its profiles are of {profile.configuration}")
    return tuple(found.values())


def _node(entry: Any) -> NodeProfile:
    name = entry["name"]
    if not isinstance(name, str):
        raise ValueError(f"a node's name is {name!r:.40}; expected text")
    duration_ns = whole(entry["duration_ns"], _MOST_NODE_NS, "duration_ns")
    return NodeProfile(name, duration_ns, whole(entry["memory_bytes"], _MOST_NODE_BYTES, "memory_bytes"))


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """The measurements of a job by its worker, as the store keeps them."""

    profiles: tuple[JobProfile, ...]  # one profile per configuration, at least one
    total_work: float | None = None  # amount of the job's work in all; None if the task did not report it
    split: str = ""  # description of the split into nodes, for a reader
    device: str = ""  # the device that it was measured on

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "split": self.split,
            "total_work": self.total_work,
            "configurations": [profile.to_dict() for profile in self.profiles],
        }

    @classmethod
    def from_dict(cls, data: Any) -> MeasuredJob:
        """Return the measurements from the data of ``to_dict``, which a job or an older version may have written.

        ValueError if it is invalid: the job has to be measured again.
        """
        if not isinstance(data, dict):
            raise ValueError(f"what was measured of a job is a {type(data).__name__}; expected an object")
        total = data.get("total_work")
        split, device = data.get("split", ""), data.get("device", "")
        if total is not None and not is_amount(total):
            raise ValueError(f"total_work is {total!r:.40}; expected null or a number of at least 0")
        if not isinstance(split, str) or not isinstance(device, str):
            raise ValueError("split or device is not text")
        try:
            profiles = profiles_from_list(data.get("configurations"))
        except ValueError as error:
            raise ValueError(f"configurations: {error}") from error
        return cls(profiles, total or None, split, device)


@dataclass(frozen=True, slots=True)
class BubbleSlot:
    """A bubble of a bubble cycle."""

    kind: BubbleKind
    duration_ns: int  # its reliable duration
    free_bytes: int  # device memory that the training leaves free in it

    def __post_init__(self) -> None:
        if self.duration_ns < 0 or self.free_bytes < 0:
            raise ValueError(f"expected no negative duration or memory in a bubble; got {self}")


@dataclass(frozen=True, slots=True)
class BubbleCycle:
    """The bubbles of an iteration of a rank, in order; they repeat every ``period_ns``."""

    period_ns: int
    slots: tuple[BubbleSlot, ...]

    @property
    def bubble_ns(self) -> int:
        return sum(slot.duration_ns for slot in self.slots)


def cycle_from_dict(data: dict[str, Any]) -> BubbleCycle:
    """Return the cycle from the data of ``asdict``; ValueError if it is none."""
    try:
        slots = (
            BubbleSlot(BubbleKind(slot["kind"]), int(slot["duration_ns"]), int(slot["free_bytes"]))
            for slot in data["slots"]
        )
        return BubbleCycle(int(data["period_ns"]), tuple(slots))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a bubble cycle: {type(error).__name__}: {error}") from error
