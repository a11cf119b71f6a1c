"""The errors that a user can cause.  Each message says what was wrong, where, and what was expected."""


class FillError(Exception):
    """The root of PipeFill's own errors."""


class ConfigError(FillError):
    """A jobs file or a ``--fill-*`` flag has a wrong value."""


class PatchError(FillError):
    """A patch does not fit the installed package."""


class TaskError(FillError):
    """A side task cannot be loaded or broke the contract of ``SideTask``."""


class GateError(FillError):
    """A gate's shared memory is not what this version reads."""
