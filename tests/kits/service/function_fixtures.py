"""What the tests of jobs on functions share: a small service, a profile of ten layers, and a platform with both."""

from __future__ import annotations

from msgspec.structs import replace

from kits.service.api_fixtures import job_body
from kits.service.platform_double import ArrivalOrder, PlatformDouble
from springtide.core.events import NodeJoined
from springtide.core.resources import make_node
from springtide.perf.functions.services import emulator
from springtide.scheduling.functions.policy import WithFunctions

MIB = 1 << 20


def layer(index, parameter_bytes=4 * MIB, forward_s=0.02):
    return {
        "name": f"layers.{index}",
        "parameter_bytes": parameter_bytes,
        "activation_bytes": 2 * MIB,
        "output_bytes": MIB // 2,
        "gradient_bytes": MIB // 2,
        "forward_s": [forward_s],
        "backward_s": [2 * forward_s],
    }


def profile(num_layers=10, **changes):
    """A profile as it is measured: on one core."""
    return {
        "model": "digits",
        "micro_batch_size": 4,
        "memory_mb": [2048],
        "bytes_per_s": [70e6],
        "layers": [layer(index) for index in range(num_layers)],
        "source": "measured on one core",
        **changes,
    }


def function_job(**changes):
    """A job on functions: 64 samples a step, 24 steps an epoch, 3 epochs, no deadline."""
    options = {
        "options__on": "functions",
        "options__layer_profile": profile(),
        "options__num_samples": 1536,
        "options__deadline_s": None,
    }
    return job_body(**{**options, **changes})


def with_functions(tmp_path, num_devices=2, num_places=2, **service):
    """A platform of two devices that is connected to a small function service."""
    platform = PlatformDouble(tmp_path, num_devices, lambda: WithFunctions(ArrivalOrder()))
    node = replace(make_node("functions", num_places, kind="function"), functions=emulator(**service))
    platform.submit(NodeJoined(node=node))
    return platform
