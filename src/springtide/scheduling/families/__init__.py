"""Jobs that learn from each other: measured steps and gradient noise of a family, and the speed by size and batch."""
