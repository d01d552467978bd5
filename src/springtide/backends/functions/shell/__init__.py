"""What surrounds the coordinator of a job on functions: its thread, the stores, the disk."""
