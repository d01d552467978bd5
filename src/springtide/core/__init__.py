"""The vocabulary: immutable values and contracts that every other package shares. No I/O, no clock, no torch."""
