"""`bench communication`: predicted against measured communication times."""
