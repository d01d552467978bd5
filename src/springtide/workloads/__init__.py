"""What arrives: one form for traces of jobs, readers of published formats, scaling tables, seeded arrivals."""
