"""column_linear: the column-parallel linear layer without sequence parallelism."""
