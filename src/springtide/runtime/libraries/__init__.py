"""Programs by Lightning, the Trainer of transformers, or Accelerate, made elastic without a change."""
