"""The options of jobs and services, each written once: every face of the platform is made of these tables."""
