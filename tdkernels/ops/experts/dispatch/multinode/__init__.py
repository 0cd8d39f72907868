"""Dispatch and combine in a group on several nodes."""
