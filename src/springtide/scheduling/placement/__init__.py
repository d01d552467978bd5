"""Which devices, once it is decided how many: topology, layouts, the ledger of free devices."""
