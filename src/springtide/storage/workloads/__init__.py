"""What a workload keeps in a store: its head, artifacts, checkpoints."""
