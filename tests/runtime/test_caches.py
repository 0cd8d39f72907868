"""Cache data structures."""

import pytest

from tdkernels.caches import RecentCache, VersionedDict


def test_entries_are_found_and_replaced():
    cache = RecentCache(4)
    cache["a"] = 1
    assert (cache.get("a"), cache.get("b"), len(cache), list(cache)) == (1, None, 1, ["a"])
    cache["a"] = 2
    assert (cache.get("a"), len(cache), cache.values()) == (2, 1, [2])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_size_is_bounded(size):
    cache = RecentCache(size)
    for number in range(50):
        cache[number] = number
        cache.get(number // 2)
        assert cache.get(number) == number
        assert len(cache) <= size


def test_recently_used_entries_are_kept():
    cache = RecentCache(8)
    cache["used"] = "here"
    for number in range(100):
        cache[number] = number
        assert cache.get("used") == "here", number
    assert cache.get(0) is None


def test_each_key_has_one_value():
    cache = RecentCache(4)
    for key in "abc":
        cache[key] = key
    cache["a"] = "new"  # it was among the older entries
    assert sorted(cache) == ["a", "b", "c"] and cache.get("a") == "new"
    cache.clear()
    assert len(cache) == 0


def test_removals_change_the_version():
    choices = VersionedDict()
    choices["a"] = 1
    assert choices.version == 0
    del choices["a"]
    choices.clear()
    assert choices.version == 2 and not choices
