"""Messages between processes of the platform."""
