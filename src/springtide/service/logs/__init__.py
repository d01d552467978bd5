"""Logs of workloads: reading them, and uploading those that pods could not upload themselves."""
