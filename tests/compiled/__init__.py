"""Every kernel compiles for every GPU that we speak of, within its shared memory, on a machine without any.

What a family of operators launches is in a module, what is asked of the machine code in a test beside it, so that tests
of all families (traces, signals, whether a kernel is missing) can take launches from anywhere.
"""
