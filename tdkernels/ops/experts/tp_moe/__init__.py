"""A layer of experts whose weights are divided between the ranks."""
