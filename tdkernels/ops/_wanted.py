"""Gradients on their way through torch.library, where what nobody wants is an empty tensor, for None cannot be told."""


def to_send(gradients, operands, wanted):
    """What an operator gives: gradients like their operands, contiguous, each another tensor; empty if not wanted."""
    triples = zip(gradients, operands, wanted, strict=True)
    return tuple(dx.to(x.dtype).contiguous() if wants else x.new_empty(0) for dx, x, wants in triples)


def to_expect(operands, wanted):
    """What its fake implementation gives, and what it gives itself of operands that are empty."""
    return tuple(x.new_empty(x.shape if wants else (0,)) for x, wants in zip(operands, wanted, strict=True))


def received(gradients, wanted):
    """What a backward returns for them."""
    return [dx if wants else None for dx, wants in zip(gradients, wanted, strict=True)]
