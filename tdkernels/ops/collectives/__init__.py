"""All-gather, reduce-scatter and all-reduce: as operators, and as asynchronous collectives for other operators."""
