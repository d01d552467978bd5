"""`bench fapes`: FaPES's tables."""
