"""Jobs on function services: admission, the number of workers and their memory, goals by phase."""
