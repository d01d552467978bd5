"""What a request to a service costs here, beside other frameworks that serve Python functions."""
