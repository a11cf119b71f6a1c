"""The file with the settings that a rank gives to its agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.fill.agent.admission import JobUser
from megatron.fill.device.port import Limits
from megatron.fill.sandbox.config import Bind
from megatron.fill.spec import Spec
from megatron.fill.types import Quota
from megatron.fill.work import NewJob


@dataclass(frozen=True, slots=True)
class AgentSpec(Spec):
    """The settings of an agent, from its rank."""

    run_dir: str
    records: str  # the folder for the agent's records
    rank: int
    ranks: int  # number of ranks that train
    parent: int  # the rank's pid; the agent's own parent is the warden
    gate_fd: int
    board_fd: int
    control_fd: int
    left_fd: int  # descriptor of the page for records that the agent cannot write (``LastWord``)
    device: str
    device_uuid: str | None  # the GPU's UUID; None on the CPU
    cpus: list[int]
    store: str  # the URL of the job store
    submit: list[NewJob]  # jobs to put into it
    policy: str  # scheduling policy, as text for ``parse_policy``
    lease_s: float  # time in seconds after which a silent agent's jobs go back to the queue
    checkpoint_s: float  # time in seconds between two checkpoints of a resumable job
    grace_ns: int
    max_overruns: int
    max_output_bytes: int
    user: JobUser | None  # user that the jobs run as; None for the agent's user
    namespaces: tuple[str, ...]  # namespaces that this machine provides for sandboxes (``Sandbox``)
    binds: tuple[Bind, ...]  # paths that jobs may use besides their own folders
    network: bool  # jobs share the machine's network
    allow: list[str]  # patterns of the jobs that may run (``admission.refusal``); empty for all
    margin_bytes: int  # device memory that the jobs leave free beyond the training's peak
    limits: Limits  # of each job; what it may have of the device's memory is found when it is taken
    mps_pipe: str | None  # pipe directory of the MPS daemon that the rank uses; None without MPS
    metrics: dict[str, Any] | None = None  # the setting ``metrics``; None for none
    quota: Quota | None = None  # most that the jobs of each user may take; None for all
    dcgm_job_mapping: str | None = None  # folder in which dcgm-exporter looks for the jobs of each GPU; None for none
    # Time in seconds for which the jobs go on after the rank's end, until another starts; 0 for none.
    between_s: float = 0.0
    node: int = 0  # number of the node
    place: int = 0  # number of the rank on its node
