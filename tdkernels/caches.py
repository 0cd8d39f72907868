"""Containers for caches: a dict of bounded size, and a dict with a version for derived caches."""


class RecentCache(dict):
    """Cache of bounded size that evicts entries that were not used recently. ``cache[key]`` is None if missing.

    It has two generations. The young one is this dict, so the lookup of a recently used entry costs a dict lookup. A
    lookup that finds its entry in the old generation moves it to the young one. When the young generation holds half of
    ``max_size``, it becomes the old one, and the entries of the previous old generation are dropped.

    Args:
        max_size: The maximum number of entries.
    """

    def __init__(self, max_size: int):
        super().__init__()
        self.max_size = max_size
        self._older: dict = {}

    def __missing__(self, key):
        """Return the value from the old generation and move it to the young one, or return None."""
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

    Caches derived from its entries include the version in their keys, so that a removal invalidates them.
    """

    version = 0

    def __delitem__(self, key):
        self.version += 1
        super().__delitem__(key)

    def clear(self):
        self.version += 1
        super().clear()
