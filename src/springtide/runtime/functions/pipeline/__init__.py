"""One stage of a model that is cut over functions."""
