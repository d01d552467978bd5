"""The Python SDK: decorators, handles and the typed client that speaks HTTP to a running platform."""
