"""Pods as replicas: specification, launch, watch, recovery, logs, shares."""
