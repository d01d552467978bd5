"""The running platform: assembly, REST API, gateway and dashboard."""
