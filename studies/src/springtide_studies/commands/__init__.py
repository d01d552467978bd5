"""Commands of the product that need the studies."""
