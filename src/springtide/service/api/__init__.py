"""REST, authentication, live updates and the dashboard."""
