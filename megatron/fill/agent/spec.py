"""What a rank tells its agent, as a file."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.agent.admission import JobUser
from megatron.fill.device import Sharing
from megatron.fill.device.emulated import Emulation
from megatron.fill.sandbox.cage import Bind
from megatron.fill.spec import Spec
from megatron.fill.store.port import NewJob


@dataclass(frozen=True, slots=True)
class AgentSpec(Spec):
    """What the rank tells its agent.

    Attributes:
        records: the folder for its records.
        ranks: how many train.
        left_fd: of the page on which the agent leaves what it cannot write.
        mps_pipe: of the MPS daemon that the rank uses; None without MPS.
        parent: the rank's pid; the warden is the agent's.
        store: the URL of the job store.
        submit: jobs to put into it.
        user: whom the jobs run as; None for us.
        namespaces: those that this machine gives for keeping jobs in, as ``Cage`` has them.
        binds: places that jobs may use besides their own folders.
        network: jobs share the machine's network.
        allow: the jobs that may run, as ``user.refusal`` reads it.
        device_uuid: of the GPU; None on the CPU.
        margin_bytes: device memory that the jobs leave free beyond the main job's peak.
        emulate: how the CPU is to behave as a device that does not preempt; None for as it is.
        policy: which job is next, as ``parse_policy`` reads it.
        lease_s: how long the store keeps a job for an agent that is silent.
        checkpoint_s: how often resumable jobs are saved.
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
    emulate: Emulation | None
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
