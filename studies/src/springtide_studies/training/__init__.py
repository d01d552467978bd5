"""What a training step costs here, beside a plain loop and DistributedDataParallel."""
