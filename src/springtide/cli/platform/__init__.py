"""Starting and stopping platforms, here and on a cluster."""
