"""The coordinator of one job on functions: attempts, changes of plan, streams, the store, the budget."""
