"""Cost and speed of functions: the menu of services, bills, collectives over stores."""
