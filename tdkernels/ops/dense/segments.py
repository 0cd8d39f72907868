"""Device function for operands [B, W, segment_rows, H], see ``layout``."""

from tdkernels import lang as td


@td.jit
def row_in_segments(row, owner, ranks, segment_rows):
    """Return the number of a row in [B, W, segment_rows, H] for row number ``row`` of a rank."""
    return (row // segment_rows * ranks + owner) * segment_rows + row % segment_rows
