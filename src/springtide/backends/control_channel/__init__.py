"""The platform's side of the control channel: who is there, what they say, what they are ordered. For every backend."""
