"""What users are told about a workload, a pool, a device, and why."""
