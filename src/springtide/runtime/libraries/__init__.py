"""Programs whose loop a library runs (Lightning, the Trainer of transformers), made elastic without a change."""
