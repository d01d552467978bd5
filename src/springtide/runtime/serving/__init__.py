"""A replica of a service: model, server, listeners, health."""
