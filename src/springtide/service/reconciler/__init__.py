"""Kubernetes objects turned into workloads, and workloads into the status of objects."""
