"""The agent of a node that holds pods to their shares."""
