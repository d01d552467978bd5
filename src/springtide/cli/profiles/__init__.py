"""`springtide profile`."""
