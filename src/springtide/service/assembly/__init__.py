"""A platform put together from its settings: local, on Kubernetes, with functions."""
