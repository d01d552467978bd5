"""`bench interpose`: what the interposition library costs a launch."""
