"""Training functions and functions run in this process, without a platform."""
