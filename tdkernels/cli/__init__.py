"""The commands of ``python -m tdkernels``."""
