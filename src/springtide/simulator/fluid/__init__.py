"""Long traces: jobs as rates of progress on nodes that fail, are loaned and come back."""
