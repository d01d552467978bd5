"""How fast, and how dear: models that predict, and functions that fit them. No policy, no I/O."""
