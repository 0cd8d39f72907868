"""Programs that provoke failures on GPUs, and what they have found: see ``bench/results/reliability``."""
