"""Shadow memory: for each byte, the numbers of the last write and of the reads since then.

The numbers are stored in pages of numpy arrays. Layer 0 of a page holds the writes, and further layers hold the reads.
Reads of a byte that are not ordered among each other need one layer each. A read that is ordered after the read in a
layer replaces it.
"""

from collections.abc import Callable

import numpy as np

_PAGE = 4096
_NONE = 0  # no access


class Shadow:
    """Shadow memory of one symmetric buffer, or of the private memory of a rank during one launch."""

    def __init__(self) -> None:
        self._pages: dict[int, list[np.ndarray]] = {}

    def read(
        self, starts: np.ndarray, stops: np.ndarray, access: int, covered: Callable[[int], bool],
    ) -> list[tuple[int, int]]:
        """Record a read. Return the conflicting writes as (number of the access, offset of the first byte).

        Args:
            starts: First byte of each interval.
            stops: End of each interval.
            access: Number of the read.
            covered: Function that returns whether an access happens before this read.
        """
        found = []
        for page, first, last, base in self._each(starts, stops):
            found += _uncovered(page[0][first:last], covered, base + first)
            for layer in page[1:]:
                part = layer[first:last]
                if all(number == _NONE or covered(number) for number in _numbers(part)):
                    part[:] = access
                    break
            else:
                page.append(np.zeros(_PAGE, dtype=np.int32))
                page[-1][first:last] = access
        return found

    def write(
        self, starts: np.ndarray, stops: np.ndarray, access: int, covered: Callable[[int], bool],
    ) -> list[tuple[int, int]]:
        """Record a write. Return the conflicting reads and writes; arguments and result are as in ``read``."""
        found = []
        for page, first, last, base in self._each(starts, stops):
            for layer in page:
                part = layer[first:last]
                found += _uncovered(part, covered, base + first)
                part[:] = _NONE
            page[0][first:last] = access
        return found

    def _each(self, starts, stops):
        """Yield the parts of pages that intervals cover: (layers, first byte, end, offset of the page)."""
        for start, stop in zip(starts.tolist(), stops.tolist()):
            while start < stop:
                number, first = divmod(start, _PAGE)
                last = min(first + stop - start, _PAGE)
                page = self._pages.get(number)
                if page is None:
                    page = self._pages[number] = [np.zeros(_PAGE, dtype=np.int32)]
                yield page, first, last, number * _PAGE
                start += last - first


def _numbers(part):
    first = int(part[0])
    return [first] if part.size == 1 or (part == first).all() else np.unique(part).tolist()


def _uncovered(part, covered, base):
    return [
        (number, base + int(np.argmax(part == number)))
        for number in _numbers(part) if number != _NONE and not covered(number)
    ]
