"""All-reduce and its kin over a store: schedules as data, their check, and the communicator that walks them."""
