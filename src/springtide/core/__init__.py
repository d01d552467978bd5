"""The vocabulary: immutable values and contracts that every other room shares. No I/O, no clock, no torch."""
