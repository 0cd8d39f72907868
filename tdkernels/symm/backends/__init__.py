"""Backends of symmetric memory, and the network libraries that they use."""
