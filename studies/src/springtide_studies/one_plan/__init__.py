"""A week with everything at once on one cluster: what the default policy costs beside stacks of separate ones."""
