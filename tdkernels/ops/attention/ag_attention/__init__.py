"""Attention of a sequence that is divided between the ranks: keys and values are gathered behind it."""
