"""``NodeTask``: a side task that is a linear list of nodes, run over and over (PipeFill, section 4.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.base import SideTask


class NodeTask(SideTask, ABC):
    """A side task whose step is the next node of a list; one pass over the list is an iteration.

    The runtime measures the nodes in each of ``configurations()``, has an execution plan made of them, and calls
    ``configure`` with the chosen one: first between ``create`` (and ``load_state_dict``) and ``init``, later between
    ``init`` and the end, but only between iterations (``next_node == 0``).  ``run_next_step`` runs node ``next_node``
    and returns 0, with the last node of an iteration the work that the iteration did.

    Attributes:
        split: how the work was split into nodes, for a reader: ``torch.export, 24 pieces``.
    """

    split: str = ""

    def configurations(self) -> list[Configuration]:
        """The ways in which this job can run, the preferred first; called after ``create``."""
        return [Configuration()]

    @abstractmethod
    def configure(self, configuration: Configuration) -> None:
        """Go on in this configuration."""

    @abstractmethod
    def node_names(self) -> tuple[str, ...]:
        """The nodes of an iteration in the present configuration, in order; called after ``init``."""

    @abstractmethod
    def iteration_work(self) -> float:
        """The work of one full iteration in the present configuration, in ``unit``."""
