"""What users see of the platform, as data."""
