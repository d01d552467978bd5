"""Training in the current process, without a platform."""
