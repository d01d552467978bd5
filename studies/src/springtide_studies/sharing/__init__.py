"""`bench sharing`: services and training on one device, against exclusive devices."""
