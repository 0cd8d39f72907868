"""A layer of experts that are divided between the ranks."""
