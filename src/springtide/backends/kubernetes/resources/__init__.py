"""The custom resources: definitions, schema, objects to options and back, status, events."""
