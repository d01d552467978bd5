"""Language models in a replica: OpenAI's API as an ASGI application, before an engine that writes tokens."""
