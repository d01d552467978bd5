"""`springtide chaos`: faults at seeded moments on a platform of its own, and the check that nothing was lost."""
