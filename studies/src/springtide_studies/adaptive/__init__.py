"""Jobs whose batch changes as they train, and what is true about their speed."""
