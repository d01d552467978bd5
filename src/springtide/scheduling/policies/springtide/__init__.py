"""The default policy: deadlines promised and kept, spare devices by marginal return."""
