"""The messages between the control plane and its workers, and their framing. No pickle: msgspec with limits.

A frame is four bytes (length, big-endian) and that many bytes of msgpack. A worker opens one connection to
`WorkerSpec.control_address`, sends Hello, and from then on sends Reports and receives Orders. Reports are numbered; the
control plane acknowledges a number once the report is in the journal, and a worker that reconnects repeats the reports
that were not acknowledged. A worker that loses its control plane goes on training and tries to reconnect; after
`lease_s` without a control plane it commits a checkpoint and exits, so that orphans do not outlive their platform.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from springtide.core.decoding import msgpack_decoder
from springtide.core.errors import BackendError
from springtide.core.shares import Share
from springtide.core.workload import (
    DEFAULT_GRACE_S,
    Checkpoint,
    InferenceService,
    ReplicaId,
    TrainingJob,
    WorkloadId,
)

MAX_FRAME_BYTES = 1 << 20
HEARTBEAT_S = 0.5
LOST_AFTER_S = 2.0
_LENGTH = struct.Struct(">I")
M = TypeVar("M")
# Reports are written to the journal, whose JSON has neither NaN nor infinity: messages with either are refused.
MAX_FINITE = 1e300
Finite = Annotated[float, msgspec.Meta(ge=-MAX_FINITE, le=MAX_FINITE)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e300)]
MAX_DEVICE_NAME = 200
MAX_REASON = 500
# Those of later versions are not known here, and shown as none.
ReasonCode = Annotated[str, msgspec.Meta(max_length=32, pattern=r"^[a-z_]*\Z")]
DeviceName = Annotated[str, msgspec.Meta(max_length=MAX_DEVICE_NAME)]


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker process needs at its start. Sent to the zygote, or passed as a file.

    `work_dir` is the workload's directory with `source/`, `checkpoints/`, `artifacts/`, `logs/` and `fence`.
    It holds `num_devices`, the first of which is `device_index` of those that it sees.
    `environment` holds torchrun's variables for scripts and those that the user has set. `share` is what the worker
    holds of its device (None: the whole); a worker with a share reports its activity in slot `share_slot` of the file
    `share_path` (core/wire/shares.py). `ordered_at_s` is when its start was ordered, on the machine's monotonic clock
    (0: unknown).

    A worker that shares no file system with the platform has a `store_url`: what must outlive the worker is in that
    object store under the workload's prefix (storage/workloads/store.py), and `work_dir` is private to the worker.
    `first_seq` is the number of the last report that the process has sent before it became the worker.
    `listen_host` is the address at which others reach it (empty: they are on the same machine and use its sockets).
    """

    workload: TrainingJob | InferenceService
    replica_id: ReplicaId
    generation: int
    control_address: str
    token: str
    work_dir: str
    log_path: str
    device_index: int = 0
    device_kind: Literal["cpu", "gpu"] = "cpu"
    num_devices: int = 1
    num_threads: int = 1
    restore: Checkpoint | None = None
    lease_s: float = 30.0
    environment: dict[str, str] = {}
    share: Share | None = None
    share_path: str = ""
    share_slot: int = 0
    ordered_at_s: float = 0.0
    store_url: str = ""
    listen_host: str = ""
    first_seq: int = 0

    @property
    def workload_id(self) -> WorkloadId:
        """The id of the job or service."""
        workload = self.workload
        return workload.job_id if isinstance(workload, TrainingJob) else workload.service_id


class _Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="report", tag=True, omit_defaults=True):
    seq: int = 0


class Hello(_Report, frozen=True, kw_only=True):
    """The first frame of a connection. `generation` is the group the worker is a member of (0: none yet).

    `proves_keys`: it can prove that it knows the key of a group; workers of earlier versions cannot.
    """

    workload_id: WorkloadId
    replica_id: ReplicaId
    token: str
    pid: int
    generation: int = 0
    step: int = 0
    is_ready: bool = False
    address: str = ""
    proves_keys: bool = False


class Heartbeat(_Report, frozen=True, kw_only=True):
    """Sent every HEARTBEAT_S by the control thread; `step` shows whether training makes progress."""

    step: int = 0


class Ready(_Report, frozen=True, kw_only=True):
    """The worker is warm: a trainer has imported and built its model; a serving replica listens at `address`.

    `phases_s` is the duration of each phase of the start, in order (`schedule`, `spawn`, `import`, `load`).
    `device_seen` is the name of the GPU that it found: its UUID, or its number where no UUID is known, and its model.
    """

    address: str = ""
    phases_s: dict[str, Duration] = {}
    device_seen: DeviceName = ""


class Preparing(_Report, frozen=True, kw_only=True):
    """The worker is not running yet: what its start waits for. Empty: this process becomes the worker now."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


class Progress(_Report, frozen=True, kw_only=True):
    """Sent by rank 0 at most a few times a second. Fields as in `ProgressReported`; `metrics` is from the user."""

    generation: int
    step: int
    total_steps: int
    world_size: int
    epoch: int = 0
    loss: Finite | None = None
    is_diverged: bool = False
    diverged_at_step: int | None = None
    samples_per_s: Duration | None = None
    metrics: dict[str, Finite] = {}
    progress: Amount | None = None
    total_progress: Amount | None = None
    global_batch_size: int | None = None
    local_batch_size: int | None = None
    step_s: Duration | None = None
    sync_s: Duration | None = None
    grad_sqr: Amount | None = None
    grad_var: Amount | None = None
    exact_obstacle: ReasonCode = ""


class Switched(_Report, frozen=True, kw_only=True):
    """Sent by every member after its first step boundary in `generation`; rank 0's carries the pause."""

    generation: int
    rank: int
    world_size: int
    step: int
    pause_s: Duration
    direction: Literal["start", "grow", "shrink", "recover", "resume", "replace"]


class CheckpointWritten(_Report, frozen=True, kw_only=True):
    """A checkpoint's manifest is in place."""

    checkpoint: Checkpoint


class Finished(_Report, frozen=True, kw_only=True):
    """The training function returned. The worker waits for the acknowledgement before it exits 0.

    `has_result` is false for members other than the leader: the result exists once the leader has reported.
    """

    generation: int
    step: int
    artifact_path: str = ""
    has_result: bool = True
    diverged_at_step: int | None = None


class Failed(_Report, frozen=True, kw_only=True):
    """The user's code raised. The traceback is in the log. The worker waits for the acknowledgement, then exits 1.

    `is_fixed_size` is as in `JobFailed`. Control planes of earlier versions do not know it: there the job has failed.
    """

    generation: int
    error: str
    is_fixed_size: bool = False


class Left(_Report, frozen=True, kw_only=True):
    """The worker has left the group for good and exits 0, after a shrink, a preemption or a drain."""

    generation: int
    step: int = 0


class GroupBrokenReport(_Report, frozen=True, kw_only=True, tag="GroupBroken"):
    """A collective of `generation` failed or timed out. The worker waits for a new group."""

    generation: int
    detail: str


Report = (
    Hello
    | Heartbeat
    | Preparing
    | Ready
    | Progress
    | Switched
    | CheckpointWritten
    | Finished
    | Failed
    | Left
    | GroupBrokenReport
)


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="order", tag=True, omit_defaults=True):
    pass


class Acknowledge(_Order, frozen=True, kw_only=True):
    """Every report up to `seq` is in the journal."""

    seq: int


class FormGroup(_Order, frozen=True, kw_only=True):
    """Form `generation` from `members` (in rank order) and switch to it at the next common step boundary.

    Sent to the members of the old and the new group; a worker that is not in `members` leaves at the switch. `previous`
    is the generation that trains now (0: none). `forced`: a member of it is lost, so abort any collective at once. The
    member with the highest committed step sends its state to those behind. `rendezvous` is where the members meet,
    `file:///path` or `tcp://host:port`, with the generation as a prefix. Over tcp its members prove to each other that
    they know `key` (empty: they are on one machine, or one of them does not know how). From the switch on a step has
    `global_batch_size` samples (0: as before).
    """

    generation: int
    members: tuple[ReplicaId, ...]
    rendezvous: str
    key: str = ""
    previous: int = 0
    forced: bool = False
    global_batch_size: int = 0


class Preempt(_Order, frozen=True, kw_only=True):
    """Stop at the next step boundary, commit a checkpoint as `generation`, and exit, all within `grace_s`."""

    generation: int
    grace_s: float = DEFAULT_GRACE_S


class Stop(_Order, frozen=True, kw_only=True):
    """Exit without a checkpoint: the job was cancelled, or a serving replica drains for at most `grace_s`."""

    grace_s: float = DEFAULT_GRACE_S


class FenceOrder(_Order, frozen=True, kw_only=True, tag="Fence"):
    """A newer generation owns the job: exit at once and write nothing."""

    reason: str = ""


Order = Acknowledge | FormGroup | Preempt | Stop | FenceOrder


class SpawnRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="zygote", tag=True):
    """To the zygote: fork a worker."""

    spec: WorkerSpec


class Spawned(msgspec.Struct, frozen=True, kw_only=True, tag_field="zygote", tag=True):
    """From the zygote: the worker was forked."""

    replica_id: ReplicaId
    pid: int


class ChildExited(msgspec.Struct, frozen=True, kw_only=True, tag_field="zygote", tag=True):
    """From the zygote: the worker has exited and was reaped. Death by a signal is a negative code, as in subprocess."""

    replica_id: ReplicaId
    pid: int
    exit_code: int


class Held(msgspec.Struct, frozen=True, kw_only=True, tag_field="zygote", tag=True):
    """From the zygote: the worker is forked later, from a process that is importing its program's libraries now."""

    replica_id: ReplicaId


ZygoteMessage = SpawnRequest | Spawned | ChildExited | Held

_ENCODER = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the message with its length in front. Raises BackendError above `max_frame_bytes`."""
    body = _ENCODER.encode(message)
    if len(body) > max_frame_bytes:
        raise BackendError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {max_frame_bytes}")
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[M]):
    """Cuts a byte stream into messages of the given type union. Raises BackendError on anything malformed.

    `max_frame_bytes` may be changed between two calls of `feed`.
    """

    def __init__(self, message_type: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgpack_decoder(message_type)
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> list[M]:
        """Add received bytes and return the messages that are now complete."""
        buffer = self._buffer
        buffer += data
        messages: list[M] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.max_frame_bytes:
                raise BackendError(f"a frame of {length} bytes is over the limit of {self.max_frame_bytes}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(buffer[start + _LENGTH.size : end])))
            except (ValueError, RecursionError) as error:
                # msgspec raises UnicodeDecodeError, a ValueError, on bad UTF-8.
                raise BackendError(f"a malformed frame: {error}") from None
            start = end
        del buffer[:start]
        return messages
