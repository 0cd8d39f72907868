"""Ulysses sequence parallelism: the projections before and after attention, fused with their all-to-alls."""
