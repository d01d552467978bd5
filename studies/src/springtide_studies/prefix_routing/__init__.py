"""Routing of a recorded trace of prompts to modelled replicas: hits, shares of work and times to the first token."""
