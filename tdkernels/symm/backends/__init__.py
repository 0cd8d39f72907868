"""The ways to get symmetric memory, one file for each."""
