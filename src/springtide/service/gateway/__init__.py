"""Where inference requests enter: routes, queues, batches, replicas, scaling."""
