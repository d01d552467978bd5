"""The executor on function services: providers, the coordinator of a job's functions, the emulator."""
