"""`bench sync` and `bench smlt-sync`: all-reduce over stores, between real processes."""
