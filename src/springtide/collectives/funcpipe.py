"""FuncPipe's pipelined scatter-reduce (section 3.3, figure 4b, equation 2): raw splits go up while others come down."""

from __future__ import annotations

from springtide.collectives.duplex import duplex_steps
from springtide.collectives.steps import Step


def funcpipe_steps(rank: int, num_workers: int, num_elements: int) -> tuple[Step, ...]:
    """One rank's steps: in step k it puts split rank + k and gets its own one from rank - (k - 1); then all sums.

    It is the full-duplex all-reduce with whole splits: a split is merged only when its last raw one has come down, so
    that in the third phase sums go up first and come down then. A worker's own split is part of its sum, as in the
    paper; the released code leaves it out.
    """
    return duplex_steps(rank, num_workers, num_elements, 1)
