"""The arithmetic of the network: the features of a query's size and type."""

from __future__ import annotations

import numpy as np

from springtide.perf.communication.gnn_layers import size_features


def test_size_features_are_smooth_in_size_and_know_unseen_types() -> None:
    sizes = np.array([1 << 20, (1 << 20) + 4096], np.float64)
    near = size_features(sizes, np.array([8, 8]), np.array([0, 0]))
    assert np.abs(near[0] - near[1]).max() < 0.01
    assert not size_features(sizes, np.array([8, 8]), np.array([-1, -1]))[:, -8:].any()
