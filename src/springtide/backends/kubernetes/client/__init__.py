"""The cluster's API: connection, authentication, cache, writes, leases."""
