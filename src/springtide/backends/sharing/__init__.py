"""The daemons that divide a device between its sharers every few milliseconds."""
