"""One replica of a model that fits into a function."""
