"""The append-only record of the loop, in SQLite or PostgreSQL."""
