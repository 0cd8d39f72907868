"""What all caches are made of: one policy by which they forget, and one way to say that an entry is out of date."""


class RecentCache:
    """A mapping of bounded size that forgets the entries that were not used lately.

    A look-up costs little more than that of a dict. Entries are in two dicts: those used since the last turn, and the
    others. When half of the room is used, the older ones are dropped, and a new turn begins.

    Args:
        max_size: the number of entries that are kept at most.
    """

    def __init__(self, max_size):
        self.max_size = max_size
        self._recent, self._older = {}, {}

    def get(self, key):
        """Return the value of a key, or None."""
        value = self._recent.get(key)
        if value is None and self._older:
            value = self._older.pop(key, None)
            if value is not None:
                self[key] = value
        return value

    def __setitem__(self, key, value):
        if len(self._recent) >= max(self.max_size // 2, 1) and key not in self._recent:
            self._recent, self._older = {}, self._recent
        self._older.pop(key, None)
        self._recent[key] = value

    def clear(self):
        self._recent, self._older = {}, {}

    def items(self):
        return [*self._older.items(), *self._recent.items()]

    def values(self):
        return [value for _, value in self.items()]

    def __iter__(self):
        return iter([key for key, _ in self.items()])

    def __len__(self):
        return len(self._recent) + len(self._older)


class VersionedDict(dict):
    """A dict whose ``version`` counts the removals.

    What follows from its entries is kept under the version at which it was found, so that nothing finds it later.
    """

    version = 0

    def __delitem__(self, key):
        self.version += 1
        super().__delitem__(key)

    def clear(self):
        self.version += 1
        super().clear()
