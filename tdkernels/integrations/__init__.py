"""Adapters that put the operators behind the interfaces of other libraries. Nothing is installed on import."""
