"""Promises over time: free capacity, what fits into it, the table of reservations."""
