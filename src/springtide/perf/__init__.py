"""Models that predict speed and cost, and functions that fit them. No policy, no I/O."""
