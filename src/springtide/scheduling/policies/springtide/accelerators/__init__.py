"""Clusters of several models of accelerator: the speed of jobs on each, the model of each job, and a plan for each."""
