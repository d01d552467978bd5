"""A worker as a process: entry, exits, the control link, memory, child processes, start phases."""
