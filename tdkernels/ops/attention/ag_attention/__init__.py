"""ag_attention: attention over a sharded sequence (context parallelism), overlapped with its all-gathers."""
