"""How a step is computed and exchanged: overlapped with its backward pass, or shard by shard in a fixed order."""
