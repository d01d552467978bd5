"""Replicas that are a command which listens on a port: its process, its port, and the requests to it."""
