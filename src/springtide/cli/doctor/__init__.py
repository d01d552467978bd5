"""`springtide doctor`: checks of this machine, cluster or account."""
