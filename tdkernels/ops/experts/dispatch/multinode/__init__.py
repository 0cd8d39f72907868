"""Dispatch and combine for groups on several nodes."""
