"""What users are told, as data."""
