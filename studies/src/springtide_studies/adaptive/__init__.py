"""Jobs whose batch size changes as they train, and their true speed."""
