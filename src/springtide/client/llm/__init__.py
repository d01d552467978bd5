"""Services of language models, as users declare them."""
