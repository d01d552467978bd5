"""Rules over several options of a job or a service, each told once for all faces that options are given by.

A rule is a pure function of the values by option and of the words of a face. It returns the sentence that refuses the
values, or None. Faces hand over what was given in one form: a range is a pair, a batch schedule a tuple of BatchPhase,
`initial_batch` the batch that a range starts with, and `micro_batch` that of the layer profile where one is given. An
option that is left out, or None, was not given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from springtide.core.errors import InvalidRequest
from springtide.core.options.kinds import not_whole_devices
from springtide.core.options.words import FaceWords
from springtide.core.workload import DEVICES_EACH, MAX_VIRTUAL_SHARDS, AdaptiveBatch, shards_for

Values = Mapping[str, Any]
Rule = Callable[[Values, FaceWords], str | None]
# What no request can mend: a platform without functions, and code that functions cannot run.
NO_SERVICE: Final = "this platform is connected to no function service"
NO_FUNCTIONS: Final = (
    f"{NO_SERVICE}; start it with one: `springtide down`, then "
    "`springtide up --functions emulator` (on this machine, to try it) or aws, alibaba; on Kubernetes set "
    "functions.provider"
)
AUTO_IS_NO_OBJECT: Final = (
    "on Kubernetes a job is an object, which says where it runs: ask `springtide quote FILE --on auto`, then submit it "
    "with --on functions or without"
)
ONLY_DECLARED: Final = (
    "only a declared job can be cut into stages for functions; write it as st.Task(model=..., dataset=..., loss=..., "
    "optimizer=...), as examples/functions_digits.py does"
)
NO_PYTHON_IN_PODS: Final = (
    "python names an interpreter of the platform's machine; on Kubernetes the interpreter is that of the image: build "
    "one with it (FROM the platform's) and name it, with --image or container.image; requirements are possible there"
)
NO_PARTS_IN_PODS: Final = (
    "in pods a worker or replica holds a share of one device, or whole ones; leave gpu or share out, or use a platform "
    "of one machine (springtide up)"
)
_DEFAULT_BATCH: Final = (32, 32)
_OF_ENVIRONMENTS: Final = ("env", "secrets", "requirements", "python")


def check_rules(rules: Sequence[Rule], values: Values, words: FaceWords) -> None:
    """Raise InvalidRequest with the sentence of the first rule that the values break."""
    for rule in rules:
        sentence = rule(values, words)
        if sentence is not None:
            raise InvalidRequest(sentence)


def first_batch_within_bounds(values: Values, words: FaceWords) -> str | None:
    """The batch that a job starts with is one that it may have."""
    (low, high), first = _batch(values), values.get("initial_batch")
    if first is None or low <= first <= high:
        return None
    return (
        f"{words.name('initial_batch')} {first}, the batch it starts with, lies outside {words.name('global_batch')} "
        f"({low} to {high}); start with {low}"
    )


def changes_need_bounds(values: Values, words: FaceWords) -> str | None:
    """What says how a batch changes has no meaning where it is fixed."""
    low, high = _batch(values)
    if low < high:
        return None
    defaults = {"max_local_batch": None, "min_local_batch": 1, "learning_rate": "linear", "length": "epochs"}
    for name, default in defaults.items():
        if values.get(name) not in (None, default):
            bounds = words.written("global_batch", (low, 16 * low))
            return f"{words.name(name)} needs a batch that may change; give it bounds like {bounds}"
    return None


def local_batches_fit(values: Values, words: FaceWords) -> str | None:
    """A batch that may change can be cut into parts that a worker takes, and each worker gets enough of it."""
    low, high = _batch(values)
    least, most = values.get("min_local_batch") or 1, values.get("max_local_batch")
    if most is not None and least > most:
        return f"{words.name('min_local_batch')} {least} is above {words.name('max_local_batch')} {most}; lower it"
    if most is not None and high > most * MAX_VIRTUAL_SHARDS:
        return (
            f"{words.name('global_batch')} goes up to {high}, which in parts of at most {most} samples are more than "
            f"{MAX_VIRTUAL_SHARDS} parts; use at most {most * MAX_VIRTUAL_SHARDS}"
        )
    workers = values.get("workers")
    if low < high and workers is not None and least * workers[0] > high:
        return (
            f"{workers[0]} workers with at least {least} samples each are more than a batch of at most {high}; lower "
            f"{words.name('workers')} or {words.name('min_local_batch')}"
        )
    return None


def shards_cut_the_batch(values: Values, words: FaceWords) -> str | None:
    """The virtual shards are a power of two, one for each worker at least, and each fits one pass of a worker."""
    shards, workers = values.get("exact"), values.get("workers")
    if shards is None or workers is None:
        return None
    low, high = _batch(values)
    batch = AdaptiveBatch(min_size=low, max_size=high, max_local_size=values.get("max_local_batch"))
    if not shards & (shards - 1) and shards >= shards_for(workers[1], batch, least=1):
        return None
    return (
        f"{words.name('exact')} {shards} must be a power of two that is at least the most workers "
        f"({workers[1]}) and, with {words.name('max_local_batch')}, cuts the largest batch into parts that fit; use "
        f"{shards_for(workers[1], batch)}, or leave it out"
    )


def schedule_ends_before_the_job(values: Values, words: FaceWords) -> str | None:
    """A batch schedule names only epochs that the job has."""
    phases, epochs = values.get("batch_schedule"), values.get("epochs") or 1
    if not phases or values.get("stream") or phases[-1].from_epoch < epochs:
        return None
    return (
        f"{words.name('batch_schedule')} names epoch {phases[-1].from_epoch}, and epochs are numbered 0 to "
        f"{epochs - 1}; raise {words.name('epochs')} or leave the phase out"
    )


def one_goal(values: Values, words: FaceWords) -> str | None:
    """A job is to be as fast as can be, or to keep a deadline."""
    if not values.get("fastest") or values.get("deadline") is None:
        return None
    return f"{words.name('fastest')} and {words.name('deadline')} are two goals; keep one (a budget may stay)"


def functions_have_one_batch(values: Values, words: FaceWords) -> str | None:
    """On functions the platform does not choose the batch."""
    low, high = _batch(values)
    if not _on_functions(values) or low == high:
        return None
    one = words.written("global_batch", low)
    return f"a job on functions has one global batch, not {low}..{high}; choose one, like {one}"


def micro_batch_within_batch(values: Values, words: FaceWords) -> str | None:
    """What flows through functions at a time is a part of the batch."""
    (low, _), micro_batch = _batch(values), values.get("micro_batch")
    if micro_batch is None or micro_batch <= low:
        return None
    return (
        f"{words.name('micro_batch')} {micro_batch} is more than the global batch of {low}; use "
        f"{words.written('micro_batch', low)}"
    )


def only_functions_know(values: Values, words: FaceWords) -> str | None:
    """What machines cannot be asked for."""
    if _on_functions(values):
        return None
    for name in ("batch_schedule", "fastest", "search", "stream", "function_workers"):
        # `search` is given with False, too.
        if values.get(name) is None or (name != "search" and not values[name]):
            continue
        told = f"{words.name(name)} is for jobs on functions; add {words.written('on', 'functions')}"
        if name == "batch_schedule":
            bounds = words.written("global_batch", (64, 256))
            return f"{told}, or on machines let the platform choose the batch within bounds: {bounds}"
        return f"{told}, or leave it out"
    return None


def profile_is_for_functions(values: Values, words: FaceWords) -> str | None:
    """Machines are not planned from layers; a quote for them may compare with functions by a profile."""
    if values.get("on") in ("functions", "auto") or values.get("layer_profile") is None:
        return None
    return (
        f"{words.name('layer_profile')} is for jobs on functions; add {words.written('on', 'functions')}, or leave it "
        "out"
    )


def functions_share_no_device(values: Values, words: FaceWords) -> str | None:
    """A share is of a device of a machine."""
    if not _on_functions(values) or values.get("share") is None:
        return None
    return (
        "a job on functions shares no device: its functions are as large as their memory; leave "
        f"{words.name('share')} out, or run it on the cluster"
    )


def workers_hold_several_devices(values: Values, words: FaceWords) -> str | None:
    """A worker holds one device, several whole ones, or a part of each; in pods a part of one."""
    each = values.get("gpu") or 1
    if each not in DEVICES_EACH:
        share = words.written("share", 0.3)
        return not_whole_devices(f"{words.name('gpu')} is {each}", share)
    if each > 1 and values.get("share") is not None and words.face == "object":
        return NO_PARTS_IN_PODS
    return _profile_is_of_one(each, values, words)


def functions_hold_no_devices(values: Values, words: FaceWords) -> str | None:
    """Only machines have devices that one worker can hold together; `auto` takes them."""
    each = values.get("gpu") or 1
    if values.get("on") != "functions" or each == 1:
        return None
    return (
        f"{words.name('gpu')} {each} is for the platform's machines: a function holds no devices; leave it out, or run "
        "the job on the cluster"
    )


def each_variable_once(values: Values, words: FaceWords) -> str | None:
    """A variable has one value, which is a secret or not."""
    twice = sorted({name.partition("=")[0] for name in values.get("secrets") or ()} & set(values.get("env") or ()))
    if not twice:
        return None
    return f"{twice[0]} is in {words.name('env')} and in {words.name('secrets')}; leave it out of one of them"


def functions_have_one_environment(values: Values, words: FaceWords) -> str | None:
    """Functions of all jobs run in the platform's image, with the environment that their service gives them; `auto`
    takes machines."""
    if values.get("on") != "functions":
        return None
    for name in _OF_ENVIRONMENTS:
        if values.get(name):
            return (
                f"{words.name(name)} is for the platform's machines: a function runs in the platform's image for "
                "functions, in which a job sets nothing; leave it out, or run the job on the cluster"
            )
    return None


def functions_need_a_profile(values: Values, words: FaceWords) -> str | None:
    """A job on functions is planned from its layers."""
    if not _on_functions(values) or values.get("layer_profile") is not None:
        return None
    return (
        f"{words.written('on', 'functions')} needs {words.name('layer_profile')}: `springtide profile FILE --layers` "
        "takes it, and `springtide run FILE --on functions` takes and sends it"
    )


def phases_hold_the_micro_batch(values: Values, words: FaceWords) -> str | None:
    """Every batch of a schedule is at least as large as what the layers were profiled with."""
    phases, micro_batch = values.get("batch_schedule"), values.get("micro_batch")
    if not phases or micro_batch is None:
        return None
    smallest = min(phase.global_batch_size for phase in phases)
    if smallest >= micro_batch:
        return None
    return (
        f"{words.name('batch_schedule')} has a batch of {smallest} samples, and {words.name('micro_batch')} is "
        f"{micro_batch}; use {words.written('micro_batch', smallest)}"
    )


def streams_have_no_length(values: Values, words: FaceWords) -> str | None:
    """A stream has no epochs, and its end is not known."""
    stream = values.get("stream")
    if not stream:
        return None
    for name, is_given in (
        ("epochs", (values.get("epochs") or 1) > 1),
        ("batch_schedule", bool(values.get("batch_schedule"))),
        ("num_samples", values.get("num_samples") is not None),
        ("deadline", values.get("deadline") is not None),
    ):
        if is_given:
            return (
                f"a job on the stream {stream!r} uses each sample once, until the stream is closed; leave out "
                f"{words.name(name)}" + (" (a budget is possible)" if name == "deadline" else "")
            )
    return None


def confidence_is_in_a_deadline(values: Values, words: FaceWords) -> str | None:
    """A probability is that of a deadline that machines keep as a promise."""
    confidence = values.get("confidence")
    if confidence is None:
        return None
    name, deadline = words.name("confidence"), words.name("deadline")
    if values.get("deadline") is None:
        return f"{name} {confidence:g} is how sure a deadline has to be; name one with {deadline}, or leave {name} out"
    if values.get("soft"):
        return f"{name} {confidence:g} is for a promise, and {words.name('soft')} makes none; leave one of them out"
    if _on_functions(values):
        return f"{name} is for the platform's machines; on functions a promise allows for the error of its model"
    return None


def memory_is_of_a_share(values: Values, words: FaceWords) -> str | None:
    """A workload that holds a whole device has all of its memory."""
    if values.get("memory") is None or values.get("share") is not None:
        return None
    memory = words.name("memory")
    return (
        f"{memory} is what is held of a shared device: ask for a share beside it, like {words.written('share', 0.3)}, "
        f"or leave {memory} out: a workload that holds a whole device has all of its memory"
    )


def replicas_hold_parts_of_several(values: Values, words: FaceWords) -> str | None:
    """A replica holds one device, or the same part of each of several."""
    each, share = values.get("gpu") or 1, values.get("share")
    if each == 1:
        return None
    gpu, written = words.name("gpu"), words.written("share", (0.3, 0.6))
    if each not in DEVICES_EACH:
        return f"{gpu} is {each}: a replica holds its share of 1, 2, 4 or 8 devices of one node"
    if share is None:
        return (
            f"{gpu} {each} is more than one device, of each of which a replica holds a share: add it, like {written}; "
            f"or leave {gpu} out"
        )
    return _profile_is_of_one(each, values, words)


# What can never be, wherever the job runs: checked as soon as options are given.
JOB_RULES: Final[tuple[Rule, ...]] = (
    first_batch_within_bounds,
    changes_need_bounds,
    local_batches_fit,
    shards_cut_the_batch,
    functions_have_one_batch,
    micro_batch_within_batch,
    one_goal,
    schedule_ends_before_the_job,
    memory_is_of_a_share,
    workers_hold_several_devices,
    each_variable_once,
)
# What depends on where a job is to run: checked when it is submitted, for a declared job may still be sent elsewhere.
PLACE_RULES: Final[tuple[Rule, ...]] = (
    functions_share_no_device,
    functions_hold_no_devices,
    functions_have_one_environment,
    only_functions_know,
)
# On options that clients fill when they submit a job: checked where requests and objects arrive.
FILLED_RULES: Final[tuple[Rule, ...]] = (
    functions_need_a_profile,
    streams_have_no_length,
    phases_hold_the_micro_batch,
    confidence_is_in_a_deadline,
)
# Beside these, of what is submitted and not only asked about.
SUBMISSION_RULES: Final[tuple[Rule, ...]] = (profile_is_for_functions,)
SERVICE_RULES: Final[tuple[Rule, ...]] = (memory_is_of_a_share, replicas_hold_parts_of_several, each_variable_once)


def _batch(values: Values) -> tuple[int, int]:
    bounds: tuple[int, int] = values.get("global_batch") or _DEFAULT_BATCH
    return bounds


def _on_functions(values: Values) -> bool:
    return values.get("on") == "functions"


def _profile_is_of_one(each: int, values: Values, words: FaceWords) -> str | None:
    if each == 1 or values.get("share") != "auto":
        return None
    return (
        f"{words.name('gpu')} {each} is of several devices, and {words.name('share')} auto is what a profile on one "
        f"device says; name the share, like {words.written('share', (0.3, 0.6))}"
    )
