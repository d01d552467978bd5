"""`bench decision`: how long a policy takes to decide."""
