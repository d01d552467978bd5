"""Shares of devices of this machine, as the executor sees them."""
