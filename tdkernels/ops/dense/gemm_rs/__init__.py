"""A matrix product, then a reduce-scatter."""
