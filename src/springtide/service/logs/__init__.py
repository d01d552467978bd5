"""Logs of workloads: read here, uploaded by workers."""
