"""The projections before and after attention whose heads, not positions, are divided between the ranks."""
