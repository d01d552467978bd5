"""`springtide doctor`: what of this machine, cluster or account works."""
