"""Programs that provoke failures on GPUs, and the cost of the batch-invariant mode.

``bench/results/reliability`` has the results of the former.
"""
