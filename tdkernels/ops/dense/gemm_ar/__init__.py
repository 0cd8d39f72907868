"""A matrix product, then an all-reduce."""
