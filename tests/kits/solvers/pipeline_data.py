"""Small pipelines drawn from a seed, in the solvers' plain numbers."""

import numpy as np

from springtide.solvers.pipeline.problem import Degree, PipelineProblem

WEIGHTS = [(1.0, 0.0), (1.0, 2.0**16), (1.0, 2.0**19), (1.0, 2.0**22), (0.0, 1.0)]


def drawn_problem(seed: int, num_layers: int, num_sizes: int, *, identical: bool = False) -> PipelineProblem:
    rng = np.random.default_rng(seed)
    memory_mb = 512.0 * np.sort(rng.choice(np.arange(1, 21), num_sizes, replace=False))
    speed = np.sort(rng.uniform(0.1, 5.0, num_sizes))

    def per_layer(mean, spread):
        values = rng.lognormal(mean, spread, num_layers)
        return np.full(num_layers, values[0]) if identical else values

    forward_s = per_layer(-1.0, 1.0)[:, None] / speed
    backward_s = forward_s * rng.uniform(0.5, 3.0)
    if not identical and seed % 3 == 0:
        forward_s[rng.integers(num_layers), 0] = np.inf
    output_bytes = per_layer(14.0, 1.5)
    total = int(rng.choice([1, 4, 16, 64]))
    gamma = float(rng.choice([2.0, 3.0, 1.2]))
    degrees = tuple(
        Degree(
            num_replicas=d,
            num_micro_batches=-(-total // d),
            sync=((gamma, 2.0 + d),) if seed % 4 else ((gamma, 2.0), (gamma / 2, 2.0 + 4 * d)),
        )
        for d in (1, 2, 4, 8)
        if d <= total
    )
    return PipelineProblem(
        forward_s=forward_s,
        backward_s=backward_s,
        parameter_bytes=per_layer(17.0, 1.2),
        activation_bytes=per_layer(16.0, 1.0),
        output_bytes=output_bytes,
        gradient_bytes=output_bytes if seed % 2 else output_bytes * rng.uniform(0.5, 1.5),
        memory_mb=memory_mb,
        bytes_per_s=np.sort(rng.uniform(20.0, 90.0, num_sizes)) * 1e6,
        latency_s=float(rng.choice([0.0, 0.04])),
        base_bytes=float(rng.choice([0.0, 300.0])) * 2**20,
        degrees=degrees,
    )
