"""Starting and stopping platforms, on this machine and on a cluster."""
