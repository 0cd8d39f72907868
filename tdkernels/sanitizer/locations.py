"""Map addresses of a rank to locations that are the same on all ranks.

The symmetric memory of CPU ranks consists of memory files, which each rank maps at its own addresses. The inode of the
file identifies the memory, so a location is (inode, offset). All other addresses are private to their rank.
"""

import bisect
import re

import numpy as np

from tdkernels.lang import context as words
from tdkernels.symm.group import live_states

PRIVATE = 0  # used instead of an inode
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) +/memfd:tdkernels", re.MULTILINE)
_WORD = 8


class Locations:
    """The symmetric memory that this process maps.

    Attributes:
        names: {inode: dict with the workspace's name and layout, and the rank of the owner}.
    """

    def __init__(self) -> None:
        self.names: dict[int, dict] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the memory mappings again, after a buffer was allocated or closed."""
        with open("/proc/self/maps") as maps:
            found = _MAPPING.findall(maps.read())
        self._mapped = sorted(
            (int(start, 16), int(stop, 16), int(inode), int(offset, 16)) for start, stop, offset, inode in found
        )
        self._starts = [start for start, *_ in self._mapped]

    def of(self, address: int) -> tuple[int, int]:
        """Return (inode, offset) of an address, or (PRIVATE, address) if it is not in symmetric memory."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            start, stop, inode, offset = self._mapped[at]
            if address < stop:
                return inode, address - start + offset
        return PRIVATE, address

    def pieces(self, addresses: np.ndarray, itemsize: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return the memory at addresses, with ``itemsize`` bytes at each, as a list of (inode, starts, stops).

        ``starts`` and ``stops`` are int64 arrays that describe disjoint intervals.
        """
        addresses = addresses.astype(np.int64)
        if addresses.size > 1:
            steps = np.diff(addresses)
            if (steps < itemsize).any():
                addresses = np.unique(addresses)
                steps = np.diff(addresses)
            cuts = np.flatnonzero(steps != itemsize) + 1
            starts = addresses[np.concatenate(([0], cuts))]
            stops = addresses[np.concatenate((cuts - 1, [addresses.size - 1]))] + itemsize
        else:
            starts, stops = addresses, addresses + itemsize
        first, last = self.of(int(starts[0])), self.of(int(stops[-1]) - 1)
        same = first[0] == last[0] and (first[0] != PRIVATE or not self._between(starts[0], stops[-1]))
        if same and first[1] - int(starts[0]) == last[1] - int(stops[-1]) + 1:
            shift = first[1] - int(starts[0])
            return [(first[0], starts + shift, stops + shift)]
        return self._split(starts, stops)

    def _between(self, start, stop):
        """Return whether symmetric memory begins between two private addresses."""
        return bisect.bisect_right(self._starts, int(start)) != bisect.bisect_right(self._starts, int(stop))

    def _split(self, starts, stops):
        which = np.searchsorted(np.array(self._starts, dtype=np.int64), starts, side="right") - 1
        found = []
        for at in np.unique(which):
            chosen = which == at
            inode, offset = self.of(int(starts[chosen][0]))
            shift = offset - int(starts[chosen][0])
            found.append((inode, starts[chosen] + shift, stops[chosen] + shift))
        return found

    def describe(self) -> None:
        """Add the workspaces that exist now to ``names``. Call it often, because buffers are closed and replaced."""
        for state in live_states():
            for workspace in state.workspaces.values():
                if workspace.buffer is not None and workspace.device.type == "cpu":
                    self._describe(state, workspace)

    def name_of(self, address: int) -> str:
        """Return a text that describes the word at an address."""
        workspace, place, _ = place_of(self.names, *self.of(address))
        return f"{place} in {workspace}"

    def _describe(self, state, workspace):
        layout = {
            "name": workspace.name, "half_signals": workspace.half_signals, "half_bytes": workspace.half_bytes,
            "data_offset": workspace.data_offset,
        }
        for owner, tensor in enumerate(workspace.buffer._tensors):
            inode, _ = self.of(tensor.data_ptr())
            if inode not in self.names:
                self.names[inode] = {**layout, "rank": state.members[owner]}


def place_of(names: dict[int, dict], inode: int, offset: int) -> tuple[str, str, int]:
    """Describe a location: (workspace and owner, part of the workspace, offset in bytes in that part)."""
    layout = names.get(inode)
    if layout is None:
        return ("private memory" if inode == PRIVATE else "symmetric memory without a workspace"), "byte", offset
    owner = f"workspace '{layout['name']}' of rank {layout['rank']}"
    if offset < layout["data_offset"]:
        index = offset // _WORD
        if index < words.MAX_RANKS.value:
            return owner, f"ready word {index}", offset % _WORD
        if index < words.SIGNALS_BEGIN.value:
            return owner, f"status word {index - words.MAX_RANKS.value}", offset % _WORD
        half, number = divmod(index - words.SIGNALS_BEGIN.value, max(layout["half_signals"], 1))
        return owner, f"signal {number} of half {half}", offset % _WORD
    half, byte = divmod(offset - layout["data_offset"], max(layout["half_bytes"], 1))
    return owner, f"data of half {half}, byte", byte
