"""Programs that provoke failures on GPUs. ``bench/results/reliability`` has their results."""
