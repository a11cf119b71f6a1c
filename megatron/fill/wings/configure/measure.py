"""Measures the network between the processes of a launcher: every ordered pair, and all-reduces by group."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from megatron.fill.display import counted
from megatron.fill.errors import ConfigError, NetworkError
from megatron.fill.launcher import local_rank
from megatron.fill.wings.configure.network import Place
from megatron.fill.wings.configure.rounds import rounds
from megatron.fill.wings.configure.samples import Measured, Reduction, Transfer

_TIMED = 3  # messages of a size each time that a pair's turn comes, after one that is not timed
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

type Groups = list[list[tuple[int, ...]]]
type Samples = dict[tuple[Any, ...], list[float]]  # transfers by (sender, receiver, size), reductions by (ranks, size)


def check_ranks() -> None:
    """Check that this process was started as one of several ranks; ConfigError if it was not."""
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"cannot measure: {missing[0]} is not set; expected to be started in every rank, by torchrun or srun"
        )
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise ConfigError("cannot measure: there is one rank; expected two or more")


def groups(hosts: Sequence[str]) -> Groups:
    """The groups of ranks whose all-reduces are timed, of two ranks or more; those in one list together.

    Each host's ranks, all hosts at a time, as they share no link; then the first ranks of all hosts, their second ones,
    and so on, one group after another; then all ranks.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    most = max(map(len, ranks.values()))
    across = [tuple(its[place] for its in ranks.values() if place < len(its)) for place in range(most)]
    together = [[tuple(its) for its in ranks.values()], *([group] for group in across), [tuple(range(len(hosts)))]]
    seen: set[tuple[int, ...]] = set()
    found: Groups = []
    for batch in together:
        new = [group for group in batch if len(group) > 1 and group not in seen]
        seen |= set(new)
        found += [new] if new else []
    return found


def measure(
    sizes: Sequence[int], repeats: int, timeout_s: float, backend: str | None, say: Callable[[str], None]
) -> Measured | None:
    """Measure together with all other ranks, which call this too.

    Args:
        sizes: two or more message sizes in bytes.
        repeats: number of times that the whole tournament is played.
        timeout_s: most seconds for one message, or for the others' turns in a round.
        backend: ``gloo`` or ``nccl``; None for what fits the device.
        say: called on rank 0 with what is measured.

    Returns:
        Everything that was timed, on rank 0; None on the others.

    Raises:
        NetworkError: another rank is gone, or does not answer in time; or the backend is not there.
    """
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    place = Place(socket.gethostname(), local_rank())
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a peer that is gone is an error, not the watchdog's abort
    limit = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("gloo", timeout=limit)
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, place)
        wire = _Wire(backend, place.local_rank, max(sizes), limit)
        hosts = [its.host for its in places]
        if rank == 0:
            many = f"{counted(len(places), 'rank')} on {counted(len(set(hosts)), 'host')} over {backend}"
            say(f"measuring {many}: {counted(len(rounds(hosts)), 'round')}, {counted(repeats, 'time')}")
        samples: Samples = {}
        for _ in range(repeats):
            _play(wire, rank, hosts, sizes, samples)
        _reduce(wire, rank, groups(hosts), sizes, repeats, samples)
        gathered: list[Any] | None = [None] * len(places) if rank == 0 else None
        dist.gather_object(samples, gathered)
        dist.destroy_process_group()
    except RuntimeError as error:  # of every kind that torch.distributed raises
        why = (str(error).splitlines() or ["?"])[0]
        raise NetworkError(f"rank {rank} on {place} cannot go on measuring: {why}; nothing is written") from error
    if gathered is None:
        return None
    return _measured(tuple(places), gathered, backend)


class _Wire:
    """Sends and receives over a backend, messages of at most ``most_bytes``."""

    def __init__(self, backend: str, local_rank: int, most_bytes: int, limit: timedelta) -> None:
        import torch
        import torch.distributed as dist

        self._backend, self._limit, self._dist = backend, limit, dist
        self._on_gpu = backend == "nccl"
        if self._on_gpu:
            torch.cuda.set_device(local_rank)
        self._group = self.group(None)
        self._buffer = torch.zeros(most_bytes, dtype=torch.uint8, device="cuda" if self._on_gpu else "cpu")
        self._synchronize: Callable[[], None] = torch.cuda.synchronize if self._on_gpu else lambda: None

    def group(self, ranks: Sequence[int] | None) -> Any:
        """A process group of these ranks (None: of all), which every rank makes."""
        return self._dist.new_group(ranks, timeout=self._limit, backend=self._backend)

    def ask(self, to: int, size_bytes: int, answer_bytes: int) -> float:
        """Send a message, and wait for its answer: the seconds that it took."""
        start = time.perf_counter()
        self._dist.send(self._buffer[:size_bytes], to, group=self._group)
        self._dist.recv(self._buffer[:answer_bytes], to, group=self._group)
        self._synchronize()
        return time.perf_counter() - start

    def answer(self, to: int, size_bytes: int, answer_bytes: int) -> None:
        self._dist.recv(self._buffer[:size_bytes], to, group=self._group)
        self._dist.send(self._buffer[:answer_bytes], to, group=self._group)
        self._synchronize()

    def reduce(self, group: Any, size_bytes: int) -> float:
        """Add up with the ranks of the group, once all have come: the seconds that it took."""
        self._dist.all_reduce(self._buffer[:1], group=group)
        self._synchronize()
        start = time.perf_counter()
        self._dist.all_reduce(self._buffer[:size_bytes], group=group)
        self._synchronize()
        return time.perf_counter() - start


def _play(wire: _Wire, rank: int, hosts: Sequence[str], sizes: Sequence[int], samples: Samples) -> None:
    """Play the tournament once; a round begins when all pairs of the one before are done."""
    import torch.distributed as dist

    for together in rounds(hosts):
        dist.barrier()
        for low, high in together:
            for sender, receiver in ((low, high), (high, low)):
                for size in sizes:
                    for turn in range(_TIMED + 1):
                        if rank == sender:
                            seconds = wire.ask(receiver, size, min(sizes))
                            if turn:
                                samples.setdefault((sender, receiver, size), []).append(seconds)
                        elif rank == receiver:
                            wire.answer(sender, size, min(sizes))


def _reduce(wire: _Wire, rank: int, found: Groups, sizes: Sequence[int], repeats: int, samples: Samples) -> None:
    import torch.distributed as dist

    made = {ranks: wire.group(ranks) for batch in found for ranks in batch}
    for _ in range(repeats):
        for batch in found:
            dist.barrier()
            for ranks in batch:
                if rank in ranks:
                    for size in sizes:
                        taken = [wire.reduce(made[ranks], size) for _ in range(_TIMED + 1)]
                        samples.setdefault((ranks, size), []).extend(taken[1:])


def _measured(places: tuple[Place, ...], gathered: Sequence[Samples], backend: str) -> Measured:
    transfers: list[Transfer] = []
    slowest: dict[tuple[Any, ...], tuple[float, ...]] = {}
    for samples in gathered:
        for key, seconds in samples.items():
            if len(key) == 3:
                transfers.append(Transfer(*key, tuple(seconds)))
            else:
                slowest[key] = tuple(map(max, seconds, slowest.get(key, seconds)))
    reductions = [Reduction(ranks, size, seconds) for (ranks, size), seconds in slowest.items()]
    return Measured(
        ranks=places,
        transfers=tuple(transfers),
        reductions=tuple(reductions),
        backend=backend,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
