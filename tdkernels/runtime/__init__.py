"""Host runtime: call cache, cached launches, torch.library, autograd and traces. Independent of the operators."""
