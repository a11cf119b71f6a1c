"""``NodeTask``: a side task that is a linear list of nodes, run repeatedly (PipeFill, section 4.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron.fill.profiles import Configuration
from megatron.fill.sidetask.base import SideTask


class NodeTask(SideTask, ABC):
    """A side task whose step is the next node of a list; a pass over the list is an iteration.

    The runtime measures the nodes in each of ``configurations()``, makes an execution plan from them, and calls
    ``configure`` with the chosen configuration: first between ``create`` (and ``load_state_dict``) and ``init``, later
    between iterations (``next_node == 0``).  ``run_next_step`` runs node ``next_node`` and returns 0; for the last node
    of an iteration, it returns the work of the iteration.

    Attributes:
        split: description of the split into nodes, for people: ``torch.export, 24 pieces``.
    """

    split: str = ""

    def configurations(self) -> list[Configuration]:
        """The configurations in which this job can run, the preferred first; called after ``create``."""
        return [Configuration()]

    @abstractmethod
    def configure(self, configuration: Configuration) -> None:
        """Continue in this configuration."""

    @abstractmethod
    def node_names(self) -> tuple[str, ...]:
        """The nodes of an iteration in the current configuration, in order; called after ``init``."""

    @abstractmethod
    def iteration_work(self) -> float:
        """The work of one full iteration in the current configuration, in ``unit``."""
