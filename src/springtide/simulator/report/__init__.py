"""The page and the charts that a simulated trace is told in."""
