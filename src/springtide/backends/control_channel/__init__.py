"""The platform's side of the connection to workers, whatever they run in."""
