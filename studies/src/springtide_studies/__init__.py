"""Evaluation beside the product: rival policies and solvers, bounds, benches of published results, figures."""
