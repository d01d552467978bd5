"""What is checked and written before a workload is handed to the loop."""
