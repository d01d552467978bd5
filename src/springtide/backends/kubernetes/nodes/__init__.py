"""What nodes of a cluster offer, and which are registered."""
