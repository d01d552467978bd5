"""Every error that Springtide raises on purpose.

    SpringtideError
    ├── InvalidRequest          the request cannot be met; the message says what would be accepted
    │   ├── InvalidSetting      a setting of the platform cannot be, or is missing
    │   ├── NotFound            no workload of that id or name
    │   ├── Conflict            the workload is in a state that does not allow it
    │   └── Unauthorized        no token, or a wrong one
    ├── CapacityError           nothing is free now; it may be later
    ├── BackendError            a machine, process or socket did not do what it was asked
    ├── StorageError            bytes could not be read or written
    │   ├── ObjectMissing       no object under that key
    │   └── Fenced              a writer of an older generation was refused
    ├── CheckpointError         a checkpoint is torn, corrupt or does not fit the model
    ├── CollectiveError         a collective did not complete before its deadline
    │   └── PeerLost            a member of the group went away
    ├── JournalError            the journal is unreadable or belongs to another platform
    │   ├── JournalDamaged      steps are missing or were changed after they were written
    │   └── Superseded          a newer term owns the journal: another control plane has taken over
    └── PolicyError             a policy returned an impossible plan: a bug in the policy

Errors for users (`InvalidRequest` and its kinds) say what to do instead; violated invariants raise AssertionError.
"""

from __future__ import annotations


class SpringtideError(Exception):
    """The root: catching it catches everything that Springtide raises on purpose."""


class InvalidRequest(SpringtideError):
    """The request cannot be met as it stands; the message says what would be accepted."""

    status = 422
    code = "invalid_request"


class SettingName(str):
    """What a setting is called in a file of settings, like functions.parameter_store."""

    __slots__ = ()

    @property
    def flag(self) -> str:
        """The flag that sets it on one machine: --functions-parameter-store."""
        return "--" + self.replace(".", "-").replace("_", "-")


class InvalidSetting(InvalidRequest):
    """A setting of the platform cannot be, or is missing.

    The sentence is made of `parts`, and the settings among them are called as their flags, or as they are in files.
    """

    def __init__(self, *parts: str | SettingName) -> None:
        super().__init__("".join(part.flag if isinstance(part, SettingName) else part for part in parts))
        self.in_files = "".join(parts)


class NotFound(InvalidRequest):
    """No workload of that id or name."""

    status = 404
    code = "not_found"


class Conflict(InvalidRequest):
    """The workload is in a state that does not allow the request."""

    status = 409
    code = "conflict"


class NoRoomBeside(Conflict):
    """No device can be had for a new revision of a service beside the present one."""

    code = "no_room_beside"


class Unauthorized(InvalidRequest):
    """No token, or a wrong one."""

    status = 401
    code = "unauthorized"


class CapacityError(SpringtideError):
    """Nothing is free now; `retry_after_s` says when a retry makes sense."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BackendError(SpringtideError):
    """A machine, process or socket did not do what it was asked."""


class StorageError(SpringtideError):
    """Bytes could not be read or written."""


class ObjectMissing(StorageError):
    """No object under that key."""


class Fenced(StorageError):
    """A writer of an older generation was refused: a newer one owns the job."""


class CheckpointError(SpringtideError):
    """A checkpoint is torn, corrupt or does not fit the model."""


class CollectiveError(SpringtideError):
    """A collective did not complete before its deadline."""


class PeerLost(CollectiveError):
    """A member of the group went away."""


class JournalError(SpringtideError):
    """The journal is unreadable or belongs to another platform."""


class JournalDamaged(JournalError):
    """Steps are missing or were changed after they were written; `seq` is the first of them."""

    def __init__(self, seq: int, message: str) -> None:
        super().__init__(f"{message}; see `springtide journal check`")
        self.seq, self.problem = seq, message


class Superseded(JournalError):
    """A newer term owns the journal: another control plane has taken over, and this one must stop acting."""


class PolicyError(SpringtideError):
    """A policy returned an impossible plan: a bug in the policy."""
