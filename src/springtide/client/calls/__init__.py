"""Calls of services, and the answers of the API."""
