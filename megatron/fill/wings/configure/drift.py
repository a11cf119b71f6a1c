"""Changes of a network between two measurements, and when to measure it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.network import Network, Place

LIMIT = 0.1  # of the bandwidth: a change that may make another configuration, or another order of ranks, the best
MOST_DAYS = 30.0
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Drift:
    """Change of a link between two measurements."""

    sender: Place
    receiver: Place
    old_bytes_per_s: float  # its bandwidth
    new_bytes_per_s: float
    spread: float  # the larger one of both measurements

    @property
    def change(self) -> float:
        """Relative change of the bandwidth: -0.2 is a fifth less."""
        return self.new_bytes_per_s / self.old_bytes_per_s - 1

    @property
    def surely(self) -> float:
        """Part of the change, up or down, is that is beyond the spread."""
        return max(0.0, abs(self.change) - self.spread)


def drifts(old: Network, new: Network) -> list[Drift]:
    """Return the drift of each link that both have, the most changed first.

    Raises:
        ConfigError: they have no link in common, or went over different backends.
    """
    if old.backend != new.backend:
        raise ConfigError(f"one was measured over {old.backend}, the other over {new.backend}; expected the same")
    before = {place: number for number, place in enumerate(old.ranks)}
    both = [(now, before[place]) for now, place in enumerate(new.ranks) if place in before]
    found = []
    for sender, old_sender in both:
        for receiver, old_receiver in both:
            was = old.bandwidth_bytes_per_s[old_sender][old_receiver]
            now = new.bandwidth_bytes_per_s[sender][receiver]
            if was is not None and now is not None:
                spread = max(old.spread[old_sender][old_receiver], new.spread[sender][receiver])
                found.append(Drift(new.ranks[sender], new.ranks[receiver], was, now, spread))
    if not found:
        raise ConfigError("the two measurements have no two places in common; expected the same hosts")
    return sorted(found, key=lambda drift: -abs(drift.change))


def again_days(old: Network, new: Network, found: Sequence[Drift]) -> float:
    """In how many days from the new measurement to measure again.

    The rule: before a link will have changed by ``LIMIT`` if it goes on changing as the most changed one has, beyond
    its spread; ``MOST_DAYS`` at the latest.  ConfigError if the new one is not newer.
    """
    passed_s = (datetime.fromisoformat(new.measured_at) - datetime.fromisoformat(old.measured_at)).total_seconds()
    if passed_s < 0:
        raise ConfigError(f"OLD was measured at {old.measured_at}, after {new.measured_at}; expected the older one")
    most = max(drift.surely for drift in found)
    return min(MOST_DAYS, passed_s / _DAY_S * LIMIT / most) if most else MOST_DAYS
