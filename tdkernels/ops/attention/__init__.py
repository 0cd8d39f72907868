"""Attention with sequences or caches that are divided between the ranks."""
