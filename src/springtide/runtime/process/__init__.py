"""A worker as an operating-system process: entry, exits, the control link, memory, child processes, start phases."""
