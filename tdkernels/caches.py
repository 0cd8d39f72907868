"""What all caches are made of: one policy by which they forget, and one way to say that an entry is out of date."""


class RecentCache(dict):
    """A mapping of bounded size that forgets the entries that were not used lately; ``cache[key]`` may be None.

    A look-up of an entry that was used lately is that of a dict. The entries used since the last turn are this dict;
    the others are in a second one. When half of the room is used, the older ones are dropped, and a new turn begins.

    Args:
        max_size: the number of entries that are kept at most.
    """

    def __init__(self, max_size):
        super().__init__()
        self.max_size = max_size
        self._older = {}

    def __missing__(self, key):
        """The value of a key that was not used since the last turn, or None."""
        value = self._older.pop(key, None)
        if value is not None:
            self[key] = value
        return value

    def __setitem__(self, key, value):
        if super().__len__() >= max(self.max_size // 2, 1) and not super().__contains__(key):
            self._older = super().copy()
            super().clear()
        self._older.pop(key, None)
        super().__setitem__(key, value)

    def get(self, key):
        return self[key]

    def clear(self):
        self._older.clear()
        super().clear()

    def items(self):
        return [*self._older.items(), *super().items()]

    def values(self):
        return [value for _, value in self.items()]

    def __contains__(self, key):
        return super().__contains__(key) or key in self._older

    def __iter__(self):
        return iter([key for key, _ in self.items()])

    def __len__(self):
        return super().__len__() + len(self._older)


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
