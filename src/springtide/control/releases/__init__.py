"""Revisions of a service: what there was, what is being released, and how one gives way to the next."""
