"""How a call becomes a launch: known calls, kept launches, torch.library, autograd, traces. Knows no operator."""
