"""Tuning tables: JSON format, recovery from bad entries, merging, and lookup of the nearest shape."""

import json
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdkernels.autotune.table import FORMAT, LaterFormat, TableError, from_json, merge, nearest, newest, to_json
from tests.autotune.entries import make_entry

M, N, K = SHAPE = 8192, 4096, 4096  # the default of make_entry; 8192 is the last M of its bucket
WANTED = make_entry().problem

# Few values, so that drawn entries often have the same problem.
ENTRIES = st.builds(
    make_entry,
    shape=st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6)),
    ms=st.floats(0.001, 1000),
    versions=st.sampled_from([{"torch": "2.13.0"}, {"torch": "2.14.0"}]),
    world_size=st.sampled_from([2, 4]),
)
TABLES = st.lists(ENTRIES, max_size=12)


def table_dict(entry=None):
    """Return the parsed JSON of a table with one entry."""
    return json.loads(to_json([entry or make_entry()]))


# ---- JSON ----


def test_every_field_survives_a_round_trip():
    config = {"method": "fused", "tiles": {"block_m": 128}, "chunk_tiles": 2}
    full = make_entry(
        "gemm_rs", "Größe 摩尔 S4000", (24, 16, 8), 2.5, config, {"torch": "2.14.0", "kernels": "c0ffee"},
        world_size=8, local_world_size=2, dtype="float16", layout="kn",
        plain_ms=3.5, default_ms=4.5, local_ms=1.5, wire_ms=0.5, when="2026-05-09",
        graph=True, modelled=True, baseline="flash attention",
    )
    assert from_json(to_json([full])) == ([full], 0)
    assert not {"graph", "modelled", "baseline"} & table_dict()["entries"][0].keys(), "written only if set"


def test_times_that_were_not_measured_stay_none():
    entry = make_entry()
    assert (entry.plain_ms, entry.default_ms, entry.local_ms, entry.wire_ms) == (None,) * 4
    assert from_json(to_json([entry])) == ([entry], 0)


def test_times_have_four_digits():
    [entry], _ = from_json(to_json([make_entry(ms=2.718281828, wire_ms=0.00314159265)]))
    assert (entry.ms, entry.wire_ms) == (2.718, 0.003142)


def test_each_entry_is_one_line():
    lines = to_json([make_entry(shape=(m, N, K)) for m in (1, 2, 3)]).splitlines()
    assert [json.loads(line.rstrip(","))["shape"][0] for line in lines[1:-1]] == [1, 2, 3]


def test_json_is_independent_of_the_order_of_entries():
    entries = [
        make_entry(shape=(9, N, K)),
        make_entry(shape=(10, N, K)),
        make_entry(shape=(10, N, K), versions={"torch": "2.14.0"}),
        make_entry(world_size=8),
        make_entry(dtype="float16"),
    ]
    assert len({to_json(list(order)) for order in permutations(entries)}) == 1


def test_invalid_json_is_an_error():
    for text in ("", "{", to_json([make_entry()])[:-2], "\0" * 8, "not a table"):
        with pytest.raises(TableError, match="not JSON"):
            from_json(text)


@pytest.mark.parametrize("text", ["[]", "null", "1", '"entries"', "{}", '{"format": 1, "entries": {}}'])
def test_json_that_is_not_a_table_is_an_error(text):
    with pytest.raises(TableError):
        from_json(text)


@pytest.mark.parametrize("missing", ["format", "operator", "gpu", "entries"])
def test_missing_header_field_is_an_error(missing):
    table = table_dict()
    del table[missing]
    with pytest.raises(TableError):
        from_json(json.dumps(table))


@pytest.mark.parametrize("version", [None, 0, -1, "1", str(FORMAT + 1), 0.5, [1]])
def test_invalid_format_is_not_reported_as_a_later_one(version):
    with pytest.raises(TableError, match="format") as error:
        from_json(json.dumps({**table_dict(), "format": version}))
    assert error.type is TableError


@pytest.mark.parametrize("change", [{}, {"entries": {}}, {"operator": None}], ids=["", "entries", "head"])
def test_later_format_is_recognized_if_other_fields_changed(change):
    with pytest.raises(LaterFormat, match=str(FORMAT + 1)):
        from_json(json.dumps({**table_dict(), **change, "format": FORMAT + 1}))


NEEDED = ("world_size", "local_world_size", "dtype", "layout", "shape", "versions", "config", "ms")
TIMES = ("ms", "plain_ms", "default_ms", "local_ms", "wire_ms")
BAD_VALUES = [
    *[(name, value) for name in ("world_size", "local_world_size") for value in (True, -1, 4.0, "4", None)],
    *[(name, value) for name in ("dtype", "layout", "when") for value in (None, 1, ["nk"])],
    *[("shape", value) for value in (None, 8192, "8192", [8192, True, 8], [8192, -1, 8], [8192, 1.5, 8], ["1"])],
    *[("versions", value) for value in (None, [], "2.13.0", {"torch": 2})],
    *[("config", value) for value in (None, [], "torch")],
    *[(name, value) for name in TIMES for value in (0, -1.0, float("nan"), float("inf"), True, "1.0")],
    ("ms", None),
    ("ms", 10**400),  # JSON has no largest integer, floats do
]


def bad_items():
    good = table_dict()["entries"][0]
    for name in NEEDED:
        yield f"no {name}", {key: value for key, value in good.items() if key != name}
    for name, value in BAD_VALUES:
        yield f"{name}={str(value)[:20]}", {**good, name: value}
    for item in (None, 1, "entry", [], {}):
        yield repr(item), item


@pytest.mark.parametrize("item", [pytest.param(item, id=name) for name, item in bad_items()])
def test_bad_entries_are_counted_and_good_ones_kept(item):
    first, last = make_entry(shape=(1, 1, 1)), make_entry(shape=(2, 2, 2))
    table = json.loads(to_json([first, last]))
    table["entries"].insert(1, item)
    assert from_json(json.dumps(table)) == ([first, last], 1)


def test_optional_fields_may_be_missing():
    table = table_dict()
    for name in (*TIMES[1:], "when"):
        del table["entries"][0][name]
    assert from_json(json.dumps(table)) == ([make_entry()], 0)


def test_unknown_keys_are_ignored():
    table = table_dict()
    table["by"] = table["entries"][0]["by"] = "somebody"
    assert from_json(json.dumps(table)) == ([make_entry()], 0)


# ---- merge ----


def test_last_entry_of_a_problem_wins():
    slow, fast, other = make_entry(ms=2.0), make_entry(ms=1.0), make_entry(shape=(1, 1, 1))
    assert merge([slow, other], [fast]) == [fast, other]
    assert merge([fast, other], [slow]) == [slow, other]
    assert merge([slow, other, fast]) == [fast, other]


def test_entries_of_different_versions_are_kept():
    old, new = make_entry(versions={"torch": "2.13.0"}), make_entry(versions={"torch": "2.14.0"})
    assert merge([old], [new]) == [old, new]


def test_order_of_versions_does_not_matter():
    one, same = make_entry(versions={"a": "1", "b": "2"}), make_entry(versions={"b": "2", "a": "1"}, ms=2.0)
    assert merge([one], [same]) == [same]


@settings(deadline=None, derandomize=True)
@given(TABLES, TABLES)
def test_merge_is_idempotent(one, other):
    merged = merge(one, other)
    assert merge(merged) == merge(merged, merged) == merge(merged, other) == merged
    assert len({entry.identity for entry in merged}) == len(merged)


@settings(deadline=None, derandomize=True)
@given(TABLES.filter(bool))
def test_round_trip_keeps_all_entries(entries):
    entries = merge(entries)
    read, bad = from_json(to_json(entries))
    assert bad == 0
    assert {entry.identity for entry in read} == {entry.identity for entry in entries}


# ---- nearest ----


def nearest_shape(*shapes):
    """Return the shape of the nearest entry to WANTED, or None; check that it is independent of the order."""
    entries = [make_entry(shape=shape) for shape in shapes]
    found = [nearest(list(order), WANTED) for order in permutations(entries)]
    assert found == [found[0]] * len(found)
    return found[0] and found[0].problem.shape


def test_newest_keeps_a_measured_and_a_modelled_entry():
    measured = [make_entry(ms=ms, when=when) for ms, when in ((3.0, "2026-01-02"), (2.0, "2026-01-01"))]
    modelled = [replace(entry, modelled=True, ms=entry.ms - 1.5) for entry in measured]
    found = newest([*modelled, *measured])
    assert sorted((entry.ms, entry.modelled) for entry in found) == [(1.5, True), (3.0, False)]


def test_empty_table_has_no_nearest_entry():
    assert nearest([], WANTED) is None


@pytest.mark.parametrize("m", [4097, 5000, 8191, 8192])
def test_m_in_the_same_bucket_counts_as_equal(m):
    assert nearest_shape((m, N, K), (16384, N, K), (4096, N, K)) == (m, N, K)
    assert nearest_shape((m, N, K), (M, N, K + 1)) == (m, N, K)


@pytest.mark.parametrize("m", [2049, 4096, 8193, 16384])
def test_m_in_the_next_bucket_is_near(m):
    assert nearest_shape((m, N, K)) == (m, N, K)


@pytest.mark.parametrize("m", [1, 2048, 16385, 32768])
def test_m_two_buckets_away_is_too_far(m):
    assert nearest_shape((m, N, K)) is None


@pytest.mark.parametrize("n, k", [(N // 2, K), (2 * N, K), (N, K // 2), (N, 2 * K), (2 * N, K // 2)])
def test_factor_of_two_in_n_or_k_is_near(n, k):
    assert nearest_shape((M, n, k)) == (M, n, k)


@pytest.mark.parametrize("n, k", [(N // 2 - 1, K), (2 * N + 1, K), (N, K // 2 - 1), (N, 2 * K + 1)])
def test_more_than_a_factor_of_two_in_n_or_k_is_too_far(n, k):
    assert nearest_shape((M, n, k)) is None


def test_smallest_sum_of_differences_wins():
    assert nearest_shape((2 * M, N, K), (M, N * 3 // 2, K)) == (M, N * 3 // 2, K)
    assert nearest_shape((2 * M, N, K), (M, N * 3 // 2, K * 3 // 2)) == (2 * M, N, K)
    assert nearest_shape((M, N * 3 // 2, K), (M, N, K * 5 // 4)) == (M, N, K * 5 // 4)


def test_larger_of_equally_near_shapes_wins():
    assert nearest_shape((5000, N, K), (8000, N, K), (6000, N, K)) == (8000, N, K)
    assert nearest_shape((M // 2, N, K), (2 * M, N, K)) == (2 * M, N, K)
    assert nearest_shape((M, N // 2, K), (M, 2 * N, K)) == (M, 2 * N, K)


OTHER_FIELDS = {
    "operator": "gemm_rs", "gpu": "AMD Testing", "world_size": 8, "local_world_size": 2, "dtype": "float16",
    "layout": "kn",
}


@pytest.mark.parametrize("name", OTHER_FIELDS)
def test_all_fields_but_the_shape_must_match(name):
    other = make_entry(**{name: OTHER_FIELDS[name]})
    assert nearest([other], WANTED) is None
    similar = make_entry(shape=(M // 2, N, K))
    assert nearest([other, similar], WANTED) == nearest([similar, other], WANTED) == similar


@pytest.mark.parametrize("shape", [(), (M, N), (M, N, K, 1), (0, N, K), (M, 0, K), (M, N, 0)])
def test_shape_of_other_length_or_with_zeros_is_not_near(shape):
    assert nearest_shape(shape) is None
    assert nearest_shape(shape, SHAPE) == SHAPE


@pytest.mark.parametrize("shape", [(0, N, K), (M, 0, K), (M, N, 0)])
def test_empty_problem_has_no_nearest_entry(shape):
    entries = [make_entry(), *[make_entry(shape=(m, N, K)) for m in (0, 1, 2)], make_entry(shape=shape)]
    assert nearest(entries, make_entry(shape=shape).problem) is None


@settings(deadline=None, derandomize=True)
@given(TABLES.filter(bool), st.data())
def test_nearest_prefers_an_entry_of_the_same_shape(entries, data):
    wanted = data.draw(st.sampled_from(entries)).problem
    found = nearest(entries, wanted).problem
    assert found.shape[1:] == wanted.shape[1:] and found.world_size == wanted.world_size
    bucket = next(2**power for power in range(99) if 2**power >= wanted.shape[0])
    assert bucket / 2 < found.shape[0] <= bucket
