"""Elastic training: the trainer, groups and their changes, the fixed-order reduction, checkpoints, the step log."""
