"""Object and parameter stores behind one protocol: memory, files, S3, shared memory, Redis."""
