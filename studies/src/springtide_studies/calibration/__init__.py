"""Whether quotes keep what they say: the probability of a deadline beside how often it was kept."""
