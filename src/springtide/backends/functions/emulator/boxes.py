"""Creates the sandbox of a new function: environment, directory, CPU share, process; and cleans up."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from springtide.backends.functions.emulator import sweeper
from springtide.backends.functions.emulator.config import EmulatorConfig
from springtide.backends.functions.emulator.instances import Function, Instance
from springtide.backends.functions.emulator.launchers import FunctionLauncher, PlainLauncher, TemplateLauncher
from springtide.backends.functions.emulator.limits import CpuShare, NoShare, StopAndGo, make_cpu_groups
from springtide.backends.functions.emulator.logs import LogIndex
from springtide.backends.functions.emulator.template import ForkRequest
from springtide.core.errors import BackendError
from springtide.storage.stores.linked import DuplexLink

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Boxes:
    """Creates instances; one per emulator. `close` removes everything."""

    def __init__(self, config: EmulatorConfig, state_dir: Path, logs: LogIndex) -> None:
        self._config = config
        self._state_dir = state_dir
        self._log_index = logs
        name = f"springtide-emulator-{os.getpid()}"
        wants_groups = config.cpu_method in ("auto", "cgroup")
        self._groups = make_cpu_groups(name) if wants_groups else None
        if self._groups is None and config.cpu_method == "cgroup":
            raise BackendError("no control group can be made here; cpu_method 'duty-cycle' needs none")
        self.cpu_method = "cgroup" if self._groups else "duty-cycle" if wants_groups else config.cpu_method
        self._plain = PlainLauncher(config.python)
        self._template = TemplateLauncher(
            config.handler, config.preload, {**_base_environment(), **_ONE_THREAD, **_python_path(config.python_path)}
        )
        self._ending: list[Instance] = []
        # In a session of its own, so that a signal to the emulator's does not end it.
        self._sweeper = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(sweeper.__file__))], stdin=subprocess.PIPE, start_new_session=True
        )
        if self._groups is not None:
            self._tell(f"+groups 0 {self._groups.parent}")

    async def warm_up(self) -> None:
        """Start the template ahead of the first function, so that none waits for it. Raises BackendError."""
        if self._config.warm_template:
            await self._template.warm_up()

    def box(self, function: Function) -> Instance:
        """A new instance, without its process. Raises BackendError."""
        identity = uuid.uuid4().hex[:12]
        offered = self._config.offered(function.memory_mb)
        vcpus = offered.vcpus * self._config.cpu_fraction
        directory = self._state_dir / "instances" / identity
        try:
            return Instance(function, directory, self._share(identity), vcpus, self._log_index, identity)
        except OSError as error:
            raise BackendError(f"a function cannot be given a place to work: {error}") from error

    async def start(self, instance: Instance, runtime_address: str) -> None:
        """Start its process. Raises BackendError."""
        function = instance.function
        # Rounded down: threads with less than a core each would wait for one another at every barrier.
        num_threads = max(1, min(os.cpu_count() or 1, math.floor(instance.vcpus + 1e-9)))
        request = ForkRequest(
            instance=instance.id,
            environment=self._environment(instance, runtime_address, num_threads),
            directory=str(instance.directory),
            group_procs=instance.share.procs_path,
            handler=function.handler,
            num_threads=num_threads,
        )
        launcher: FunctionLauncher = self._template if self._is_forked(function) else self._plain
        try:
            if launcher is self._template:
                # Wait for the template before the function's time starts to count.
                await self._template.warm_up()
            instance.created_at_s = time.monotonic()
            instance.process = await launcher.launch(request, instance.pipe.writer)
        finally:
            instance.pipe.started()
        self._tell(f"+{instance.id} {instance.process.pid} {instance.share.group_dir or '-'}")

    def forget(self, instance: Instance) -> None:
        """An instance has ended: remove its limits as soon as all its processes have died."""
        self._ending.append(instance)
        self.clear_up()

    def clear_up(self) -> None:
        """Remove limits that could not be removed before."""
        left = []
        for instance in self._ending:
            if instance.share.remove():
                self._tell(f"-{instance.id}")
            else:
                left.append(instance)
        self._ending = left

    async def close(self) -> None:
        """End the template and the sweeper, which removes what is left."""
        await self._template.close()
        self.clear_up()
        if self._groups is not None:
            self._groups.remove()
        assert self._sweeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._sweeper.stdin.close()
        self._sweeper.wait()

    def _is_forked(self, function: Function) -> bool:
        is_own = not function.code_dir and not self._config.python and function.handler == self._config.handler
        return self._config.warm_template and is_own

    def _share(self, identity: str) -> CpuShare:
        if self._groups is not None:
            return self._groups.share(identity)
        return StopAndGo() if self.cpu_method == "duty-cycle" else NoShare()

    def _tell(self, line: str) -> None:
        assert self._sweeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._sweeper.stdin.write(f"{line}\n".encode())
            self._sweeper.stdin.flush()

    def _environment(self, instance: Instance, runtime_address: str, num_threads: int) -> dict[str, str]:
        """The variables of Lambda, the role, the link and the function; none of the emulator's own environment."""
        function = instance.function
        offered = self._config.offered(function.memory_mb)
        link = DuplexLink(
            up_bytes_per_s=offered.bytes_per_s,
            down_bytes_per_s=offered.bytes_per_s,
            latency_s=self._config.service.latency_s,
        )
        environment = {
            **_base_environment(),
            **{name: str(num_threads) for name in _ONE_THREAD},
            **link.to_environment(),
            **self._config.role_environment,
            **function.environment,
            "HOME": str(instance.directory),
            "TMPDIR": str(instance.directory / "tmp"),
            "AWS_LAMBDA_RUNTIME_API": runtime_address,
            "AWS_LAMBDA_FUNCTION_NAME": function.name,
            "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_mb),
            "AWS_LAMBDA_LOG_GROUP_NAME": function.group,
            "AWS_LAMBDA_LOG_STREAM_NAME": instance.id,
            "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
            "AWS_REGION": self._config.region,
            "AWS_DEFAULT_REGION": self._config.region,
            "_HANDLER": function.handler,
            "LAMBDA_TASK_ROOT": function.code_dir or str(instance.directory),
        }
        places = (function.code_dir, *self._config.python_path, environment.get("PYTHONPATH", ""))
        return {**environment, **_python_path(places)}


def _python_path(places: Sequence[str]) -> dict[str, str]:
    given = [place for place in places if place]
    return {"PYTHONPATH": os.pathsep.join(given)} if given else {}


def _base_environment() -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TZ": ":UTC",
        "PYTHONUNBUFFERED": "1",
        # Threads that spin while they wait would use up the quota.
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        # Functions must not write into the interpreter's installation.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
