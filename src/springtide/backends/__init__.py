"""Executors on machines: each backend does what the controller's actions say, on one kind of place to run."""
