"""Decode attention over a key-value cache that is sharded along the sequence."""
