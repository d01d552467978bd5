"""The page and the charts of simulated traces."""
