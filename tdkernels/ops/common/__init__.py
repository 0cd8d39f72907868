"""What operators of several families are made of."""
