"""The workers of a job that train together as one generation, on the machines of models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from springtide_studies.fault_seeds.machine import Process


class ModelledGroup:
    """Workers that train together as one generation. Not training: it is stalled, broken or has finished."""

    def __init__(self, generation: int, members: list[Process], step: int, num_seen: int, batch_size: int) -> None:
        self.generation = generation
        self.members = members
        self.step = step
        self.num_seen = num_seen
        self.batch_size = batch_size
        self.began_s = 0.0
        self.step_s = 1.0
        self.is_training = False
        self.is_broken = False
        self.broken_at_s = 0.0
        self.is_finished = False
        self.ticket = 0
        self.checkpoint_due_s = math.inf
        self.progress_due_s = math.inf
