"""A function service on loopback: a provider's Invoke and Runtime APIs, each function a process with its limits."""
