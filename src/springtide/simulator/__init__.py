"""The executor made of models: the same Controller and the same loop, on virtual machines and virtual time."""
