"""A pipeline over functions: profile, plan, tasks, step time."""
