"""What holds the shares of a GPU: the interposition library, its daemon, and how both are built and found."""
