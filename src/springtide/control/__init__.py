"""The control plane: what is true (records), how it changes (transitions), what to do about a plan (reconcile)."""
