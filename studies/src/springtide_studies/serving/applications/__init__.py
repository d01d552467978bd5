"""The same handlers as applications of each framework. Each file runs in the framework's own interpreter."""
