"""Request-level decisions, pure: which requests go together, to which replica, and which are refused on arrival."""
