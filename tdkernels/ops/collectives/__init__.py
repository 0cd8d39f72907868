"""All-gather, reduce-scatter and all-reduce: as operators, and asynchronous ones for other operators."""
