"""The executor made of models, for whole traces: virtual time, fluid jobs, jobs whose batch changes, reports."""
