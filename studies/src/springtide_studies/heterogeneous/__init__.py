"""Clusters of several models of device: `springtide bench heterogeneous`, beside Gavel's and Sia's rules."""
