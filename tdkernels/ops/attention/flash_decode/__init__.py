"""Attention of new tokens to a cache whose keys are divided between the ranks."""
