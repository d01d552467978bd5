"""Manifests, rights, settings, and the check before the first job."""
