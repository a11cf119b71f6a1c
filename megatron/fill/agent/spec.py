"""The file with the settings that a rank gives to its agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.fill.agent.admission import JobUser
from megatron.fill.device import Sharing
from megatron.fill.sandbox.config import Bind
from megatron.fill.spec import Spec
from megatron.fill.types import Quota
from megatron.fill.work import NewJob


@dataclass(frozen=True, slots=True)
class AgentSpec(Spec):
    """The settings of an agent, from its rank.

    Attributes:
        records: the folder for the agent's records.
        ranks: number of ranks that train.
        left_fd: descriptor of the page for records that the agent cannot write (``LastWord``).
        mps_pipe: pipe directory of the MPS daemon that the rank uses; None without MPS.
        parent: the rank's pid; the agent's own parent is the warden.
        store: the URL of the job store.
        submit: jobs to put into it.
        user: user that the jobs run as; None for the agent's user.
        namespaces: namespaces that this machine provides for sandboxes (``Sandbox``).
        binds: paths that jobs may use besides their own folders.
        network: jobs share the machine's network.
        allow: patterns of the jobs that may run (``admission.refusal``); empty for all.
        device_uuid: the GPU's UUID; None on the CPU.
        margin_bytes: device memory that the jobs leave free beyond the training's peak.
        metrics: the setting ``metrics``; None for none.
        quota: most that the jobs of each user may take; None for all.
        dcgm_job_mapping: folder in which dcgm-exporter looks for the jobs of each GPU; None for none.
        policy: scheduling policy, as text for ``parse_policy``.
        lease_s: time in seconds after which a silent agent's jobs go back to the queue.
        checkpoint_s: time in seconds between two checkpoints of a resumable job.
        between_s: time in seconds for which the jobs go on after the rank's end, until another starts; 0 for none.
        node: number of the node.
        place: number of the rank on its node.
    """

    run_dir: str
    records: str
    rank: int
    ranks: int
    parent: int
    gate_fd: int
    board_fd: int
    control_fd: int
    left_fd: int
    device: str
    device_uuid: str | None
    cpus: list[int]
    store: str
    submit: list[NewJob]
    policy: str
    lease_s: float
    checkpoint_s: float
    grace_ns: int
    max_overruns: int
    max_output_bytes: int
    user: JobUser | None
    namespaces: tuple[str, ...]
    binds: tuple[Bind, ...]
    network: bool
    allow: list[str]
    margin_bytes: int
    processes: int
    files: int
    sharing: Sharing
    mps_pipe: str | None
    sm_percentage: int
    metrics: dict[str, Any] | None = None
    quota: Quota | None = None
    dcgm_job_mapping: str | None = None
    between_s: float = 0.0
    node: int = 0
    place: int = 0
