"""The errors that a user can cause.  Each message says what was wrong, where, and what was expected."""


class FillError(Exception):
    """The root of PipeFill's own errors."""


class ConfigError(FillError):
    """A jobs file or a ``--fill-*`` flag has a wrong value."""


class PatchError(FillError):
    """A patch does not fit the installed package."""


class TaskError(FillError):
    """A side task cannot be loaded or broke the contract of ``SideTask``."""


class StaleProfile(TaskError):
    """A task has changed since it was measured."""


class GateError(FillError):
    """A gate's shared memory is not what this version reads."""


class StoreError(FillError):
    """The job store cannot be reached, or is not what this version reads."""


class JobError(FillError):
    """There is no such job, or it is in no state for what was asked."""


class PlanError(FillError):
    """A job fits no bubble; the message says which node is too long or too large for which bubble, and by how much."""


class GraphError(FillError):
    """A model's graph or a plan for it is not valid, or no plan fits the devices."""


class ControlError(FillError):
    """A run cannot be controlled from here, or its control page is not what this version reads."""


class SandboxError(FillError):
    """The walls around a job cannot be built as they were asked for."""


class NetworkError(FillError):
    """The network between ranks cannot be measured."""
