"""Building blocks shared by several families of operators."""
