"""Hosts for the Redis through which functions exchange gradients."""
