"""All-reduce fused with a residual addition and a norm."""
