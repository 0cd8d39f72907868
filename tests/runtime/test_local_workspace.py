"""Private words of launches without communication: which launches share them, and how long they exist.

The words are on the device "meta", which has no streams, so the stream and whether it captures are given.
"""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from tdkernels.runtime import local_workspace

META = torch.device("meta")


@pytest.fixture
def now(monkeypatch):
    """The current stream, in a thread perhaps another one, and whether it captures."""
    now = SimpleNamespace(stream=1, of_thread=threading.local(), captures=False)
    monkeypatch.setattr(local_workspace, "_slabs", {})
    monkeypatch.setattr(local_workspace, "_full", [])
    monkeypatch.setattr(local_workspace, "_of_stream", {})
    active = SimpleNamespace(get_current_stream=lambda index: getattr(now.of_thread, "stream", now.stream))
    monkeypatch.setattr(local_workspace, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return now


def first_word(words):
    return words.storage_offset()


def test_each_stream_has_its_own(now):
    words = local_workspace.local_flags(META, 1)
    assert local_workspace.local_flags(META, 100) is words
    more = local_workspace.local_flags(META, 200)
    assert first_word(more) >= first_word(words) + len(words) and local_workspace.local_flags(META, 1) is more
    now.stream = 2
    assert first_word(local_workspace.local_flags(META, 1)) >= first_word(more) + 200


def test_streams_of_two_threads(now, monkeypatch):
    """The second thread takes words while the first one does."""
    first_is_in, second_is_done = threading.Event(), threading.Event()
    found, take = {}, local_workspace._take

    def slow_take(device, count):
        if not first_is_in.is_set():
            first_is_in.set()
            second_is_done.wait(0.2)  # the second thread waits for the lock
            _, taken = local_workspace._slabs.get(META, (None, 0))
            assert taken == 0, "another thread has taken words meanwhile"
        return take(device, count)

    def run(stream):
        now.of_thread.stream = stream
        found[stream] = local_workspace.local_flags(META, 1)

    monkeypatch.setattr(local_workspace, "_take", slow_take)
    threads = [threading.Thread(target=run, args=(stream,)) for stream in (1, 2)]
    threads[0].start()
    assert first_is_in.wait(5)
    threads[1].start()
    threads[1].join(0.1)
    second_is_done.set()
    for thread in threads:
        thread.join(5)
    assert len(found) == 2 and first_word(found[1]) != first_word(found[2])


def test_each_captured_launch_has_its_own(now):
    eager = local_workspace.local_flags(META, 1)
    now.captures = True
    places = [first_word(local_workspace.local_flags(META, 1)) for _ in range(10)]
    assert places == sorted(set(places)) and places[0] >= first_word(eager) + len(eager)


def test_capture_without_free_words(now):
    """The graph zeroes words of its own then, since a slab cannot be allocated during capture."""
    now.captures = True
    assert local_workspace.local_flags(META, 1)._base is None
    now.captures = False
    local_workspace.local_flags(META, 1)
    now.captures = True
    taken = [local_workspace.local_flags(META, 100) for _ in range(local_workspace._SLAB // 100 + 2)]
    assert taken[0]._base is not None and taken[-1]._base is None


def test_words_of_a_graph_outlive_their_slab(now):
    local_workspace.local_flags(META, 1)
    now.captures = True
    slab = weakref.ref(local_workspace.local_flags(META, 1)._base)  # the graph holds an address, no reference
    now.captures = False
    for now.stream in range(2, 6):
        local_workspace.local_flags(META, local_workspace._SLAB // 2)
    gc.collect()
    assert slab() is not None and slab() is not local_workspace._slabs[META][0]
