"""A modelled world of functions in which searches for goals are played."""
