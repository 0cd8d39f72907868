"""Shadow memory: for each byte the last write and the reads since then, as numbers of accesses.

Bytes are kept in pages of numpy arrays. A byte's reads take as many layers as there were reads that are not ordered
among each other; a read that is ordered after the one in a layer takes its place.
"""

import numpy as np

_PAGE = 4096
_NONE = 0  # no access


class Shadow:
    def __init__(self):
        self._pages = {}

    def read(self, starts, stops, access, covered):
        """Enter a read; the numbers of the writes that are not ``covered(number)``, each with a place."""
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

    def write(self, starts, stops, access, covered):
        """Enter a write; the numbers of the reads and writes that are not ``covered``, each with a place."""
        found = []
        for page, first, last, base in self._each(starts, stops):
            for layer in page:
                part = layer[first:last]
                found += _uncovered(part, covered, base + first)
                part[:] = _NONE
            page[0][first:last] = access
        return found

    def _each(self, starts, stops):
        """The pages that intervals touch: (layers, first, last byte in it, the place of its first byte)."""
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
