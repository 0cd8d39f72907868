"""All-gather, then a matrix product."""
