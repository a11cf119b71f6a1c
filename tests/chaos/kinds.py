"""The kinds of faults, with the state and the reason that their jobs must end with."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.errors import ConfigError
from megatron.fill.types import JobState
from tests.chaos.attacks import brought, outside
from tests.chaos.attacks.table import ATTACKS, FAMILIES
from tests.chaos.kind import DISK, MIB, FaultKind, Source

_MADE = "made to fail"
_ENDLESS = "after its bubble|did not return within"  # the latter if the training ended before that
_SLOW = 0.2  # the share of faults that take seconds each


def _raising(callback: str) -> FaultKind:
    where = rf"{_MADE} in {callback}\(\)"
    return FaultKind(f"raise-{callback.replace('_', '-')}", f"an exception in {callback}()", reason=where)


def _honest(name: str, what: str, source: Source, weight: float = 1.0) -> FaultKind:
    """A fault that its job survives."""
    return FaultKind(name, what, source, JobState.SUCCEEDED, "", weight=weight, exact=True)


def _driven(name: str, what: str) -> FaultKind:
    return FaultKind(name, what, Source.DRIVER, weight=_SLOW)


_CALLBACKS = ("create", "init", "start", "run_next_step", "pause", "stop", "state_dict", "load_state_dict")

KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        *map(_raising, _CALLBACKS),
        FaultKind("sys-exit", "sys.exit() in a step", reason=r"sys\.exit\(3\) in run_next_step\(\)"),
        FaultKind("nonsense", "a step that returns no number", reason="expected the work done as a number"),
        FaultKind("os-exit", "os._exit() in a step", reason="status 4 in run_next_step"),
        FaultKind("sigkill-self", "SIGKILL to itself", reason="SIGKILL in run_next_step"),
        FaultKind("sigsegv", "a segmentation fault", reason="SIGSEGV in run_next_step"),
        _honest("sigstop-self", "SIGSTOP to itself in a step", Source.TASK),
        _honest("sigkill-outside", "SIGKILL from outside", Source.VICTIM, weight=_SLOW),
        _honest("sigstop-outside", "SIGSTOP from outside for a second", Source.VICTIM, weight=_SLOW),
        FaultKind("hang", "a step that sleeps for ever", reason=_ENDLESS, weight=0.5),
        FaultKind(
            "hang-gil",
            "native code that never returns and holds the GIL",
            reason=_ENDLESS,
            weight=0.5,
        ),
        FaultKind("deaf-loop", "a busy loop that ignores all signals it can", reason=_ENDLESS, weight=0.5),
        FaultKind("memory-hog", "memory over the job's cap", reason="its cap of 256 MiB", memory_bytes=256 * MIB),
        FaultKind(
            "fork-bomb",
            "300 processes that slip out of the group",
            reason="process|forked",
            weight=_SLOW,
            memory_bytes=16384 * MIB,  # memory that they share is counted for each
        ),
        FaultKind("descriptor-leak", "open files without end", reason="Too many open files|leaked|status 1"),
        FaultKind("output-flood", "output without end", reason="printed more than", weight=0.5),
        _honest("file-limit", "checkpoints that cannot be written (RLIMIT_FSIZE)", Source.TASK),
        _honest("checkpoint-newest", "a damaged checkpoint; the one before it is whole", Source.TASK, weight=0.5),
        FaultKind("checkpoint-both", "both checkpoints damaged", reason="no checkpoint can be loaded", weight=0.5),
        _honest("gate-write", "tries to write, grow or cut gate and board", Source.TASK),
        _honest("gate-close", "closes its ends of gate, board, baton and log", Source.TASK),
        FaultKind("baton-scribble", "random bytes all over the baton", reason=_MADE),
        FaultKind("log-scribble", "random bytes all over its step log"),
        _driven("agent-kill", "SIGKILL to a rank's agent"),
        _driven("agent-stop", "SIGSTOP to a rank's agent"),
        _driven("store-locked", "the job store locked for 3 s"),
        _driven("store-away", "the job store's file moved away for 3 s"),
        _driven("clock-forward", "wall clocks of agents an hour ahead for 2 s"),
        _driven("clock-back", "wall clocks of agents an hour back for 2 s"),
        FaultKind(
            "disk-full", "the disk of run folder and store full for 2 s", Source.DRIVER, weight=_SLOW, needs=DISK
        ),
        FaultKind(
            "cuda-illegal-access", "a kernel that reads where it must not", Source.GPU, reason="illegal|CUDA error"
        ),
        FaultKind(
            "cuda-out-of-memory", "device memory over the job's cap", Source.GPU, reason="out of memory|over its cap"
        ),
        FaultKind("cuda-kill-in-kernel", "SIGKILL in the middle of a kernel", Source.GPU, reason="SIGKILL"),
        FaultKind("mps-illegal-access", "the same under MPS", Source.GPU, reason="illegal|CUDA error"),
        FaultKind("mps-out-of-memory", "the same under MPS", Source.GPU, reason="out of memory|over its cap"),
        FaultKind("mps-kill-in-kernel", "the same under MPS", Source.GPU, reason="SIGKILL"),
        *(attack.kind for attack in ATTACKS.values()),
        *brought.KINDS,
        *outside.KINDS,
    )
}
HONEST = _honest("honest", "no fault: does its work and says how much", Source.TASK)
COMMAND = FaultKind("command", "no fault: a command that ends well", Source.TASK, JobState.SUCCEEDED)
_FAMILIES = {name: [attack.kind.name for attack in family] for name, family in FAMILIES.items()}
_FAMILIES |= {"brought": [kind.name for kind in brought.KINDS], "outside": [kind.name for kind in outside.KINDS]}


def chosen(names: Sequence[str]) -> list[FaultKind]:
    """Return the kinds with these names; all kinds if there are none.

    Args:
        names: kinds, or families of attacks (``processes``, ``words``, ...).

    Raises:
        ConfigError: a name is unknown; the message lists the known ones.
    """
    names = [name for given in names for name in _FAMILIES.get(given, [given])]
    unknown = [name or "''" for name in names if name not in KINDS]
    if unknown:
        raise ConfigError(f"--kinds names {', '.join(unknown)}; expected some of {', '.join([*KINDS, *_FAMILIES])}")
    return [KINDS[name] for name in dict.fromkeys(names)] or list(KINDS.values())
