"""Kits for plug-in writers: does a policy, does an executor keep the contract? And the golden traces."""
