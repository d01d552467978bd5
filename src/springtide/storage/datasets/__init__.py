"""Datasets in shards: cut, listed, cached, read in order, whole or growing."""
