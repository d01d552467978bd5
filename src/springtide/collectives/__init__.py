"""All-reduce and its kin over a store: schedules as data, and the communicator that executes them."""
