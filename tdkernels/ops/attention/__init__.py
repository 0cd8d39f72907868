"""Attention over sequences or caches that are sharded along the sequence."""
