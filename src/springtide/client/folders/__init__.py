"""The folder that travels with a job: which one it is, what of it, and sending what the platform lacks."""
