"""What is remembered between two decisions, and when a policy has to decide again."""
