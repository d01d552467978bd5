"""The agent of a node that has the shares of its pods enforced."""
