"""Ahead-of-time compilation tests: every kernel compiles for every supported GPU and fits into its shared memory.

They need no GPU. For each operator family, one module builds the launches, and a test module next to it checks the
machine code. Tests of all families (traces, signals, missing kernels) import the launches from these modules.
"""
