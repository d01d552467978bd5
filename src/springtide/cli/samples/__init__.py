"""Sample functions that `springtide hello` runs to check the platform; they can be copied as a start."""
