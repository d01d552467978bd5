"""The policies of the product, one file or folder each."""
