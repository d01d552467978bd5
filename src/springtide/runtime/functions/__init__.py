"""What runs inside a cloud function: the worker of one place, its states, lanes and reports."""
