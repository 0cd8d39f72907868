"""rocSHMEM on the host, against a stand-in for its library (rocshmem_stand_in.c), with processes of this machine.

The stand-in cannot show the behavior of AMD's library: these tests have not run on an AMD GPU.
"""

import ctypes
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from tdkernels.lang import rocshmem_library
from tdkernels.lang.rocshmem_library import UNIQUE_ID_BYTES, InitAttributes, RocshmemError, RocshmemLibrary
from tdkernels.symm.backends import rocshmem
from tests.support.ranks import DEVICE

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="needs no GPU: `make test` runs it"),
    pytest.mark.skipif(not shutil.which("cc"), reason="the stand-in for rocSHMEM needs a C compiler, cc"),
]

SOURCE = Path(__file__).parent / "rocshmem_stand_in.c"
WAIT_S = 60
VARIABLE = "TDKERNELS_ROCSHMEM_LIBRARY"
HEAP = 1 << 16  # bytes per PE of the stand-in


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """Build the stand-in, at most once per variant: ``stand_in("EMPTY", cxx=True)`` returns the path of a library."""
    libraries, folder = {}, tmp_path_factory.mktemp("rocshmem")

    def make(*defines, cxx=False):
        key = (*defines, cxx)
        if key not in libraries:
            libraries[key] = folder / f"librocshmem-{len(libraries)}.so"
            compiler = ["c++", "-x", "c++"] if cxx else ["cc"]
            flags = ["-shared", "-fPIC", "-O1", *[f"-D{define}" for define in defines]]
            subprocess.run([*compiler, *flags, SOURCE, "-o", libraries[key], "-lrt"], check=True)
        return libraries[key]

    return make


# ---- one process per PE ----


def exchange_in(folder, rank, world_size):
    """Return an ``exchange`` function based on files, in place of the store of a process group."""
    turn = 0

    def exchange(text):
        nonlocal turn
        turn += 1
        unfinished = folder / f"unfinished-{rank}"
        unfinished.write_text(text)
        unfinished.rename(folder / f"{turn}-{rank}")
        paths = [folder / f"{turn}-{other}" for other in range(world_size)]
        deadline = time.monotonic() + WAIT_S
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, "a rank is missing in the exchange"
            time.sleep(0.002)
        return [path.read_text() for path in paths]

    return exchange


def _child(connection, body, folder, rank, world_size, environment, args):
    os.environ.update(environment)
    try:
        result = body(rank, world_size, exchange_in(folder, rank, world_size), *args)
        connection.send((True, result))
    except BaseException:
        connection.send((False, traceback.format_exc()))


@pytest.fixture
def on_pes(stand_in, tmp_path):
    """Run ``body(rank, world_size, exchange, *args)`` in processes; return the results by rank, or raise their errors.

    ``environment`` is a dictionary for all processes, or a list with one for each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.symm.test_rocshmem"])  # loads torch once

    def run(world_size, body, *args, library=None, environment=None):
        library = {VARIABLE: str(library or stand_in())}
        environments = environment if isinstance(environment, list) else [environment or {}] * world_size
        processes, connections = [], []
        for rank in range(world_size):
            parent, child = context.Pipe()
            own = {**library, **environments[rank]}
            process = context.Process(target=_child, args=(child, body, tmp_path, rank, world_size, own, args))
            process.start()
            child.close()
            processes.append(process)
            connections.append(parent)
        try:
            answers = [_answer(connection, rank) for rank, connection in enumerate(connections)]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
        failed = [f"PE {rank}:\n{answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    return run


def _answer(connection, rank):
    try:
        return connection.recv() if connection.poll(WAIT_S) else (False, "no answer")
    except EOFError:
        return False, f"process {rank} died"


def memory(address, nbytes):
    return (ctypes.c_ubyte * nbytes).from_address(address)


def pattern(writer, nbytes, turn=0):
    return bytes((7 * index + 50 * writer + 91 * turn + 1) % 256 for index in range(nbytes))


def error_of(call, *args):
    """Return the type and the text of the error of a call."""
    try:
        call(*args)
    except Exception as err:
        return type(err).__name__, str(err)
    raise AssertionError("there was no error")


# ---- put and get ----


def put_and_get_on_every_pe(rank, world_size, exchange, nbytes):
    runtime = rocshmem.start(rank, world_size, exchange)
    assert (runtime.pe, runtime.num_pes, runtime.version) == (rank, world_size, "3.4.0")
    assert [runtime.pe_of(other) for other in range(world_size)] == list(range(world_size))
    source, inbox, fetched = (runtime.malloc(world_size * nbytes) for _ in range(3))
    for turn in range(3):
        memory(source, nbytes)[:] = pattern(rank, nbytes, turn)
        runtime.barrier()
        for peer in range(world_size):
            runtime.put_on_stream(inbox + rank * nbytes, source, nbytes, peer, 0)
            runtime.get_on_stream(fetched + peer * nbytes, source, nbytes, peer, 0)
        runtime.barrier()
        expected = b"".join(pattern(peer, nbytes, turn) for peer in range(world_size))
        assert bytes(memory(inbox, world_size * nbytes)) == expected, "put"
        assert bytes(memory(fetched, world_size * nbytes)) == expected, "get"
    runtime.barrier()
    for peer in range(world_size):
        reached = runtime.peer_address(source, peer)
        assert (reached == source) == (peer == rank)
        assert bytes(memory(reached, nbytes)) == pattern(peer, nbytes, 2), "direct"
    runtime.barrier()
    for address in (fetched, inbox, source):
        runtime.free(address)
    runtime.finalize()


@pytest.mark.parametrize("world_size, cxx", [(2, False), (3, False), (2, True)], ids=["2", "3", "2 mangled"])
def test_puts_and_gets(on_pes, stand_in, world_size, cxx):
    if cxx and not shutil.which("c++"):
        pytest.skip("mangled names need a C++ compiler, c++")
    on_pes(world_size, put_and_get_on_every_pe, 1001, library=stand_in(cxx=cxx))


def put_to_unreachable_peer(rank, world_size, exchange):
    runtime = rocshmem.start(rank, world_size, exchange)
    address = runtime.malloc(64)
    memory(address, 64)[:] = pattern(rank, 64)
    runtime.barrier()
    reached = [runtime.peer_address(address, peer) for peer in range(world_size)]
    assert reached[rank] == address
    assert [bool(peer_address) for peer_address in reached] == [peer == rank or peer != 1 for peer in range(world_size)]
    if rank == 0:
        runtime.put_on_stream(address, address, 64, 1, 0)
    runtime.barrier()
    assert bytes(memory(address, 64)) == pattern(0 if rank == 1 else rank, 64)
    runtime.finalize()


def test_unreachable_peer(on_pes):
    on_pes(2, put_to_unreachable_peer, environment={"STAND_IN_UNREACHABLE": "1"})


def copy_in_stream_order(rank, world_size, exchange):
    runtime = rocshmem.start(rank, world_size, exchange)
    tools = ctypes.CDLL(os.environ[VARIABLE])
    tools.stand_in_stream.restype, tools.stand_in_step.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    first, second, inbox = (runtime.malloc(256) for _ in range(3))
    memory(first, 256)[:], memory(second, 256)[:] = pattern(rank, 256, 0), pattern(rank, 256, 1)
    runtime.barrier()
    stream, peer = tools.stand_in_stream(), 1 - rank
    runtime.put_on_stream(inbox, first, 256, peer, stream)
    runtime.put_on_stream(inbox, second, 256, peer, stream)
    runtime.get_on_stream(second, first, 256, peer, stream)
    seen = []
    for left in (2, 1, 0):
        runtime.barrier()
        seen.append((bytes(memory(inbox, 256)), bytes(memory(second, 256))))
        runtime.barrier()
        assert tools.stand_in_step(stream) == left
    runtime.barrier()
    assert [inside for inside, _ in seen] == [bytes(256), pattern(peer, 256, 0), pattern(peer, 256, 1)]
    assert [own for _, own in seen] == [pattern(rank, 256, 1)] * 3
    assert bytes(memory(second, 256)) == pattern(peer, 256, 0)
    runtime.finalize()


def test_streams(on_pes):
    on_pes(2, copy_in_stream_order)


# ---- calls of the library ----


def use_every_function(rank, world_size, exchange):
    rocshmem_library._LONGEST = 100
    runtime = rocshmem.start(rank, world_size, exchange)
    assert rocshmem.start(rank, world_size, exchange) is runtime, "the second start must not exchange anything"
    first, second = runtime.malloc(300), runtime.malloc(300)
    memory(first, 300)[:] = pattern(5, 300)
    runtime.put_on_stream(second, first, 250, 0, 0)
    assert bytes(memory(second, 300)) == pattern(5, 250) + bytes(50), "a long transfer is split"
    runtime.put_on_stream(second, first, 0, 0, 0)  # skipped, since the library would launch no thread
    runtime.init_module(0xABC, 0xDEF)
    runtime.barrier()
    runtime.free(first)
    runtime.finalize()
    runtime.finalize()
    runtime.free(second)


def test_calls(on_pes, tmp_path):
    log = tmp_path / "log"
    on_pes(1, use_every_function, environment={"STAND_IN_LOG": str(log)})
    assert log.read_text().splitlines() == [
        "get_uniqueid", "set_attr_uniqueid_args 0 1", "init_attr 1", "malloc 300", "malloc 300",
        "putmem_on_stream 100 0", "putmem_on_stream 100 0", "putmem_on_stream 50 0", "hipmodule_init 0xabc 0xdef",
        "barrier_all", "free 0", "barrier_all", "finalize",
    ]


def reject_bad_arguments(rank, world_size, exchange):
    assert error_of(rocshmem.start, 3, 2, exchange) == ("ValueError", "rank: 3 is not one of 2 ranks")
    runtime = rocshmem.start(rank, world_size, exchange)
    address = runtime.malloc(64)
    found = [
        error_of(rocshmem.start, 0, 2, exchange), error_of(runtime.malloc, 0), error_of(runtime.malloc, 1.5),
        error_of(runtime.free, address + 8), error_of(runtime.pe_of, 1), error_of(runtime.peer_address, address, -1),
        error_of(runtime.put_on_stream, address, address, 64, 1, 0),
        error_of(runtime.put_on_stream, address, address, -1, 0, 0),
        error_of(runtime.put_on_stream, address + 1, address, 64, 0, 0),
        error_of(runtime.get_on_stream, address, address - 1, 64, 0, 0),
    ]
    assert {kind for kind, _ in found} == {"ValueError"}
    expected = ["rank: ", "nbytes", "nbytes", "address: ", "rank: ", "pe: ", "pe: ", "nbytes", "dst: ", "src: "]
    assert all(text.startswith(word) for (_, text), word in zip(found, expected)), found
    runtime.finalize()


def test_bad_arguments(on_pes):
    on_pes(1, reject_bad_arguments)


def fill_heap(rank, world_size, exchange):
    runtime = rocshmem.start(rank, world_size, exchange)
    runtime.malloc(1000)
    kind, text = error_of(runtime.malloc, HEAP)
    assert kind == "RocshmemError"
    assert "rocshmem_malloc(65536) returned null with 1000 bytes held before" in text and "ROCSHMEM_HEAP_SIZE" in text
    runtime.malloc(1000)
    runtime.finalize()


def test_full_heap(on_pes):
    on_pes(2, fill_heap)


def fail_init_module(rank, world_size, exchange):
    runtime = rocshmem.start(rank, world_size, exchange)
    kind, text = error_of(runtime.init_module, 1)
    assert kind == "RocshmemError" and "rocshmem_hipmodule_init failed with status 1" in text
    runtime.finalize()


def test_failing_module(on_pes):
    on_pes(1, fail_init_module, environment={"STAND_IN_FAIL": "hipmodule_init"})


# ---- a failed start is an error on all ranks ----


def fail_to_start(rank, world_size, exchange):
    return error_of(rocshmem.start, rank, world_size, exchange)


def on_rank(rank, **environment):
    """Return the environments of two ranks, one of which is extended."""
    return [environment if other == rank else {} for other in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("environment, expected", [
    ({"STAND_IN_FAIL": "set_attr"}, "rocshmem_set_attr_uniqueid_args failed with status 1"),
    ({"STAND_IN_VERSION": "3.2.1"}, "is rocSHMEM 3.2.1: it is too old"),
    ({VARIABLE: "/nowhere/librocshmem.so"}, "'/nowhere/librocshmem.so', where there is no file"),
], ids=["set_attr", "version", "no file"])
def test_start_fails_on_one_rank(on_pes, environment, expected, rank):
    if environment == {"STAND_IN_FAIL": "set_attr"}:  # on one rank only, the other would wait forever in the library
        found = on_pes(2, fail_to_start, environment=environment)
        rank = "0, 1"
    else:
        found = on_pes(2, fail_to_start, environment=on_rank(rank, **environment))
    assert len(set(found)) == 1, "both ranks must raise the same error"
    kind, text = found[0]
    assert kind == "RocshmemError" and f"does not start on rank {rank}. Rank " in text and expected in text


@pytest.mark.parametrize("name, ranks", [("get_uniqueid", "0"), ("init_attr", "0, 1")])
def test_library_fails_to_start(on_pes, name, ranks):
    kind, text = on_pes(2, fail_to_start, environment={"STAND_IN_FAIL": name})[1]
    assert kind == "RocshmemError" and f"rank {ranks}. Rank 0: rocshmem_{name} failed with status 1" in text


def test_versions_differ(on_pes):
    for kind, text in on_pes(2, fail_to_start, environment=on_rank(1, STAND_IN_VERSION="3.5.0")):
        assert kind == "RocshmemError" and text.endswith("rank 0: 3.4.0, rank 1: 3.5.0")


def start_with_short_id(rank, world_size, exchange):
    def shortened(text):
        offers = [json.loads(text) for text in exchange(text)]
        offers[0]["unique_id"] = offers[0]["unique_id"][:-2]
        return [json.dumps(offer) for offer in offers]

    return error_of(rocshmem.start, rank, world_size, shortened)


def test_size_of_unique_id(on_pes, stand_in):
    for kind, text in on_pes(2, start_with_short_id):
        assert (kind, text) == ("RocshmemError", "rank 0 has sent a unique id of 127 bytes, rocSHMEM's have 128")
    library = RocshmemLibrary(stand_in())
    assert len(library.get_uniqueid()) == UNIQUE_ID_BYTES
    with pytest.raises(RocshmemError, match="has 128 bytes, this one has 129"):
        library.init(0, 1, bytes(129))
    assert library.n_pes() == -1


# ---- adopting a rocSHMEM that the program has started ----


def adopt_running_library(rank, world_size, exchange, pes):
    library = RocshmemLibrary(os.environ[VARIABLE])
    ids = exchange(library.get_uniqueid().hex())
    library.init(pes[rank], world_size, bytes.fromhex(ids[0]))
    runtime = rocshmem.start(rank, world_size, exchange)
    assert runtime.pe == pes[rank]
    assert [runtime.pe_of(other) for other in range(world_size)] == pes
    address = runtime.malloc(64)
    memory(address, 64)[:] = bytes(64)
    runtime.barrier()
    memory(address, 64)[rank] = 0
    source = runtime.malloc(64)
    memory(source, 64)[:] = pattern(rank, 64)
    runtime.put_on_stream(address, source, 64, runtime.pe_of((rank + 1) % world_size), 0)
    runtime.barrier()
    assert bytes(memory(address, 64)) == pattern((rank - 1) % world_size, 64)
    runtime.finalize()
    library.barrier_all()  # the library is still running
    assert library.n_pes() == world_size
    assert error_of(runtime.barrier) == ("RocshmemError", "barrier: rocSHMEM was finalized in this process")


def test_adopts(on_pes, tmp_path):
    log = tmp_path / "log"
    on_pes(3, adopt_running_library, [2, 0, 1], environment={"STAND_IN_LOG": str(log)})
    calls = log.read_text().splitlines()
    assert calls.count("init_attr 1") == 3 and "finalize" not in calls
    assert calls.count("free 0") == 3 and calls.count("free 128") == 3, "the runtime's memory must be freed"


def start_with_other_library(rank, world_size, exchange, pes, count, folder):
    """Start the library as PE ``pes[rank]`` of ``count`` (None: not at all); the first two processes are the world."""
    library = RocshmemLibrary(os.environ[VARIABLE])
    ids = exchange(library.get_uniqueid().hex())
    if pes[rank] is not None:
        library.init(pes[rank], count, bytes.fromhex(ids[rank if count == 1 else 0]))
    return error_of(rocshmem.start, rank, 2, exchange_in(folder, rank, 2)) if rank < 2 else None


@pytest.mark.parametrize("pes, count, expected", [
    ([None, 0], 1, "on some ranks only: rank 0: not started, rank 1: started"),
    ([0, 0], 1, "are not the PEs of one rocSHMEM: rank 0: PE 0 of 1, rank 1: PE 0 of 1"),
    ([1, 1], 2, "are not the PEs of one rocSHMEM: rank 0: PE 1 of 2, rank 1: PE 1 of 2"),
    ([1, 0, 2], 3, "are not the PEs of one rocSHMEM: rank 0: PE 1 of 3, rank 1: PE 0 of 3"),
], ids=["some", "separate libraries", "twice", "more PEs"])
def test_does_not_adopt(on_pes, tmp_path, pes, count, expected):
    folder = tmp_path / "start"
    folder.mkdir()
    for kind, text in on_pes(len(pes), start_with_other_library, pes, count, folder)[:2]:
        assert kind == "RocshmemError" and expected in text


# ---- after finalize ----


def call_after_finalize(rank, world_size, exchange):
    runtime = rocshmem.start(rank, world_size, exchange)
    address = runtime.malloc(64)
    runtime.finalize()
    runtime.finalize()
    runtime.free(address)
    runtime.free(12345)
    errors = [
        error_of(runtime.malloc, 64), error_of(runtime.peer_address, address, 0), error_of(runtime.barrier),
        error_of(runtime.put_on_stream, address, address, 64, 0, 0),
        error_of(runtime.get_on_stream, address, address, 64, 0, 0), error_of(runtime.init_module, 1),
        error_of(rocshmem.start, rank, world_size, exchange),
    ]
    assert all(kind == "RocshmemError" and "was finalized in this process" in text for kind, text in errors), errors


def test_after_finalize(on_pes):
    on_pes(1, call_after_finalize)


# Ways to end a process with a running rocSHMEM: code; exit status; calls until the end. An atexit function registered
# after the start runs before the runtime's, and one registered before the start runs after it.
AFTER, BEFORE = ["registered after"], ["registered before", "unloaded"]
EXITS = {
    "plainly": ("", 0, [*AFTER, "finalize", *BEFORE]),
    "finalized": ("runtime.finalize()", 0, ["barrier_all", "finalize", *AFTER, *BEFORE]),
    "sys.exit": ("sys.exit(3)", 3, [*AFTER, "finalize", *BEFORE]),
    "late free": (
        "class Last:\n    def __del__(self): runtime.free(address)\nlast = Last()", 0, [*AFTER, "finalize", *BEFORE]
    ),
    "exception": ("raise KeyError('the program')", 1, [*AFTER, *BEFORE]),
    "no driver": (
        "def fails(): raise OSError('no driver')\nrocshmem._synchronize = fails", 0, [*AFTER, *BEFORE]
    ),
}

# One process loads torch and forks one process per case, which exits like a regular interpreter.
PROGRAM = """
import atexit, os, sys
from tdkernels.symm.backends import rocshmem
def note(text):
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(text + "\\n")
for name, (more, _, _) in {exits}.items():
    if os.fork() == 0:
        break
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), sep="=", flush=True)
else:
    os._exit(0)
os.dup2(os.open(f"{{name}}.stderr", os.O_WRONLY | os.O_CREAT), 2)
os.environ["STAND_IN_LOG"] = f"{{name}}.log"
atexit.register(note, "registered before")
runtime = rocshmem.start(0, 1, lambda text: [text])
address = runtime.malloc(64)
atexit.register(note, "registered after")
exec(more)
"""


@pytest.fixture(scope="module")
def exits(stand_in, tmp_path_factory):
    """Return (exit status, calls until the end, standard error) of each of ``EXITS``."""
    folder = tmp_path_factory.mktemp("exits")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, VARIABLE: str(stand_in()), "PYTHONPATH": path}
    program = [sys.executable, "-c", PROGRAM.format(exits=EXITS)]
    done = subprocess.run(program, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
    statuses = dict(line.split("=") for line in done.stdout.splitlines())
    return {
        name: (int(status), (folder / f"{name}.log").read_text().splitlines(), (folder / f"{name}.stderr").read_text())
        for name, status in statuses.items()
    }


@pytest.mark.parametrize("name", EXITS)
def test_exit(exits, name):
    (_, expected, end), (status, calls, errors) = EXITS[name], exits[name]
    assert status == expected, errors
    assert calls[calls.index("malloc 64") + 1 :] == end
    if name == "no driver":
        assert errors == "tdkernels: rocSHMEM was not finalized: no driver\n"
    else:
        assert ("Traceback" in errors) == (name == "exception"), errors


# ---- lookup of the library ----


@pytest.fixture
def no_installation(monkeypatch):
    """Remove all environment variables, folders and modules that lead to an installed library."""
    for name in (VARIABLE, "ROCSHMEM_HOME", "ROCM_PATH"):
        monkeypatch.delenv(name, raising=False)
    folders = rocshmem_library.library_folders
    elsewhere = lambda: [folder for folder in folders() if not str(folder).startswith(("/opt", "/usr"))]  # noqa: E731
    monkeypatch.setattr(rocshmem_library, "library_folders", elsewhere)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    return monkeypatch


def install(home, *names, library=None):
    for name in names:
        path = Path(home, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(library.read_bytes() if library else b"!<arch>\n")
    return path


def test_names_of_cxx(stand_in):
    """The mangled names and the size of the struct passed by reference equal those of a C++ compiler."""
    if not shutil.which("c++") or not shutil.which("nm"):
        pytest.skip("needs c++ and nm")
    symbols = subprocess.run(["nm", "-D", "--defined-only", stand_in(cxx=True)], capture_output=True, text=True)
    found = set(re.findall(r"\bT (_ZN8rocshmem\w+)", symbols.stdout))
    assert found == {rocshmem_library.mangled(name) for name in rocshmem_library.SYMBOLS}
    assert ctypes.sizeof(InitAttributes) == 144


def test_finds_the_library(no_installation, stand_in, tmp_path):
    home, rocm, extension = tmp_path / "home", tmp_path / "rocm", tmp_path / "_rocshmem4py.so"
    paths = [
        install(rocm, "lib64/librocshmem.so", library=stand_in()),
        install(home, "lib/librocshmem.so", library=stand_in()),
        install(tmp_path, extension.name, library=stand_in()),
        install(tmp_path, "mine.so", library=stand_in()),
    ]
    no_installation.setenv("ROCM_PATH", str(rocm))
    assert rocshmem_library.load().path == str(paths[0])
    no_installation.setenv("ROCSHMEM_HOME", str(home))
    assert rocshmem_library.load().path == str(paths[1])
    no_installation.setitem(sys.modules, "_rocshmem4py", type(sys)("_rocshmem4py"))
    sys.modules["_rocshmem4py"].__file__ = str(extension)
    assert rocshmem_library.load().path == str(paths[2]), "an imported extension may have started the library"
    no_installation.setenv(VARIABLE, str(paths[3]))
    assert rocshmem_library.load().path == str(paths[3])


def test_finds_the_extension_without_importing_it(no_installation, stand_in, tmp_path):
    path = install(tmp_path, "_rocshmem4py.so", library=stand_in())
    no_installation.syspath_prepend(str(tmp_path))
    assert rocshmem_library.load().path == str(path)
    assert "_rocshmem4py" not in sys.modules


def test_finds_nothing(no_installation, tmp_path):
    no_installation.setenv("ROCSHMEM_HOME", str(tmp_path))
    with pytest.raises(RocshmemError, match=rf"was not found in {tmp_path}/lib, {tmp_path}/lib64. It needs rocSHMEM"):
        rocshmem_library.load()
    install(tmp_path, "lib/librocshmem.a")
    with pytest.raises(RocshmemError, match=f"There is only a static archive, {tmp_path}/lib/librocshmem.a. It needs"):
        rocshmem_library.load()


@pytest.mark.parametrize("defines, expected", [
    (["EMPTY"], "exports none of rocSHMEM's host functions. It needs"),
    (["LACKS_STREAMS"], "lacks rocshmem_putmem_on_stream, rocshmem_getmem_on_stream: it is too old. It needs"),
], ids=str)
def test_lacks_functions(stand_in, defines, expected):
    with pytest.raises(RocshmemError) as caught:
        RocshmemLibrary(stand_in(*defines))
    assert expected in str(caught.value) and VARIABLE in str(caught.value)


def test_invalid_library(tmp_path):
    path = install(tmp_path, "librocshmem.so")
    with pytest.raises(RocshmemError, match=f"cannot be loaded from {path}: "):
        RocshmemLibrary(path)
