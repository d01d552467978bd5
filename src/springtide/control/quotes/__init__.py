"""What a submission would meet at this moment: forecasts, alternatives, budgets."""
