"""Lending: tensors within a limit of memory, slices, reloading in place, and what goes wrong."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
from package.models import DTYPES, sparse_model, write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")


def run(program, *args, timeout=60):
    """Runs a program in a process of its own, with the package."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, args)],
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def test_names_metadata_and_tensors(model):
    path, tensors = model
    with dmalane.safe_open(path, framework="bytes") as f:
        assert f.keys() == list(f) == list(tensors) and len(f) == len(tensors) and "F32.matrix" in f
        assert f.metadata() == {"made": "here"}
        for name in random.Random(1).sample(list(tensors), len(tensors)):
            tensor = f.get_tensor(name)
            assert (tensor.name, tensor.dtype, list(tensor.shape)) == (name, *tensors[name][:2])
            assert tensor.tobytes() == tensors[name][2]
        with pytest.raises(dmalane.UnknownTensorError) as error:
            f.get_tensor("nothing")
        assert isinstance(error.value, KeyError) and error.value.tensor == "nothing"
        for use in (f.get_tensor, f.get_slice):
            with pytest.raises(dmalane.UnknownTensorError, match="did you mean 'F32.matrix'"):
                use("F32.matrx")
        assert repr(f) == f"<safe_open of {path}>"
        assert repr(f.get_slice("F32.matrix")) == "<Slice of 'F32.matrix': F32 [3, 16]>"
        with pytest.raises(TypeError, match="tensors"):
            f.tensors("F32.matrix")
    for use in (f.keys, lambda: f.get_tensor("F32.matrix"), f.metadata, lambda: next(f.tensors())):
        with pytest.raises(dmalane.ClosedError):
            use()
    assert tensor.tobytes() == tensors[name][2], "what was lent stays"


def test_tensors_arrive_in_the_order_of_their_bytes(model, large):
    for path in (model[0], large):
        with dmalane.safe_open(path, framework="bytes", memory_limit="16MiB") as f:
            assert [(name, t.name) for name, t in f.tensors()] == [(name, name) for name in f.keys()]
            assert f.report()["memory_used"] == 0
    loaded = dmalane.load_file(large)
    with dmalane.safe_open(large, memory_limit=16 << 20) as f:
        for name, array in f.tensors():
            assert np.array_equal(array.view(np.uint32), loaded[name].view(np.uint32))


def test_the_limit_holds_whatever_the_size_of_the_model(large):
    done = run(
        """
        import sys, dmalane
        def resident():
            with open("/proc/self/status") as lines:
                status = dict(line.split(":", 1) for line in lines)
            return sum(int(status[key].split()[0]) for key in ("RssAnon", "HugetlbPages")) << 10
        import numpy
        before = most = resident()
        with dmalane.safe_open([sys.argv[1]], memory_limit="12MiB") as f:
            for name, array in f.tensors():
                most = max(most, resident())
        print(most - before)
        """,
        large,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (12 << 20) + (8 << 20)


def test_tensors_that_are_kept_meet_the_limit(large):
    with dmalane.safe_open(large, framework="bytes", memory_limit="10MiB") as f:
        kept = []
        with pytest.raises(dmalane.MemoryLimitError, match="release tensors") as error:
            for item in f.tensors():
                kept.append(item)
        assert error.value.limit == 10 << 20 and error.value.used <= 10 << 20 and error.value.wanted >= 4 << 20
        assert isinstance(error.value, MemoryError)
        assert error.value.tensor == "layer.02" and 'to read tensor "layer.02"' in str(error.value)
        with pytest.raises(dmalane.MemoryLimitError) as error:
            f.get_tensor("layer.20")
        assert error.value.tensor == "layer.20"
        assert f"raise it to {error.value.wanted + error.value.used}" in str(error.value)
        del item
        kept[0][1].release()
        assert f.get_tensor("layer.20").nbytes == 4 << 20
    with dmalane.safe_open(large, memory_limit="1MiB") as f:
        for read in (lambda: next(f.tensors()), lambda: f.get_tensor("layer.00")):
            with pytest.raises(dmalane.MemoryLimitError, match="in slices") as error:
                read()
            assert error.value.tensor == "layer.00" and f"raise it to {error.value.wanted}" in str(error.value)
        assert f.get_slice("layer.00")[:16].shape == (16, 1024)
        for part in (slice(None), (slice(None), slice(0, 1023))):
            with pytest.raises(dmalane.MemoryLimitError) as error:
                f.get_slice("layer.00")[part]
            assert error.value.tensor == "layer.00"
    with pytest.raises(dmalane.MemoryLimitError, match=r"raise it to \d+, or read less"):
        dmalane.load_file(large, memory_limit="95MiB")


def test_cycles_are_collected_before_the_limit_is_an_error(large):
    with dmalane.safe_open(large, memory_limit="12MiB") as f:
        for _, array in f.tensors():
            cycle = [array]
            cycle.append(cycle)


def test_a_stream_that_is_left_ends_its_thread(large):
    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    for _ in range(20):
        with dmalane.safe_open(large, memory_limit="16MiB") as f:
            next(f.tensors())
    deadline = time.monotonic() + 10
    # A thread of an earlier test may have ended in the meantime, so their number alone does not say that ours has.
    while (threads() > before or f.report()["memory_used"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before
    assert f.report()["memory_used"] == 0


def slices(chance, shape):
    """A random index, and the same for NumPy."""
    index = []
    for dim in shape[: chance.randint(0, len(shape))]:
        if chance.random() < 0.2 and dim:
            index.append(chance.randrange(-dim, dim))
        else:
            edge = [None, *range(-dim - 2, dim + 3)]
            index.append(slice(chance.choice(edge), chance.choice(edge)))
    if chance.random() < 0.2:
        index.insert(chance.randint(0, len(index)), Ellipsis)
    return tuple(index)


def test_slices_are_those_of_numpy(tmp_path):
    chance = random.Random(7)
    arrays = {}
    for i, shape in enumerate([(), (5,), (7, 9), (3, 4, 5), (2, 0, 3), (2, 3, 4, 5), (40, 3000)]):
        arrays[f"t{i}"] = np.arange(int(np.prod(shape)), dtype="<i4").reshape(shape)
    path = write_model(
        tmp_path / "m.safetensors", {n: ("I32", list(a.shape), a.tobytes()) for n, a in arrays.items()}, pad=8
    )
    with dmalane.safe_open(path) as f, safetensors.safe_open(path, framework="numpy") as theirs:
        for name, array in arrays.items():
            for _ in range(150):
                index = slices(chance, array.shape)
                ours = f.get_slice(name)[index]
                assert np.array_equal(ours, array[index]) and ours.shape == array[index].shape, (name, index)
        assert np.array_equal(f.get_slice("t6")[3:9, 5:7], theirs.get_slice("t6")[3:9, 5:7])
        assert f.get_slice("t6").get_shape() == theirs.get_slice("t6").get_shape()
        assert f.get_slice("t6").get_dtype() == theirs.get_slice("t6").get_dtype()
        for bad in ((40,), (0, 0, 0), (..., ...), slice(None, None, 2), (-41,)):
            with pytest.raises(IndexError):
                f.get_slice("t6")[bad]
        for bad in ([1, 2], None, True, 1.0, "a"):
            with pytest.raises(TypeError, match="an index is"):
                f.get_slice("t6")[bad]


def test_long_slices_of_a_large_tensor(large):
    whole = dmalane.load_file(large)["layer.05"]
    with dmalane.safe_open(large) as f:
        part = f.get_slice("layer.05")
        for index in (np.s_[100:900], np.s_[:, 10:1000], np.s_[5:7, 3:4], np.s_[3]):
            assert np.array_equal(part[index].view(np.uint32), whole[index].view(np.uint32))


def test_slices_of_packed_types(model):
    path, tensors = model
    with dmalane.safe_open(path) as f:
        assert f.get_slice("F4.matrix")[1:].tobytes() == tensors["F4.matrix"][2][8:]
        assert f.get_slice("F4.matrix")[1, 2:6].tobytes() == tensors["F4.matrix"][2][9:11]
        with pytest.raises(ValueError, match="whole bytes"):
            f.get_slice("F4.matrix")[:, 1:2]
        assert f.get_slice("F6_E2M3.matrix")[:, 4:8].nbytes == 9


def test_reloading_in_place(model, large):
    path, tensors = model
    loaded = dmalane.load_file(path)
    addresses = {n: a.ctypes.data for n, a in loaded.items() if isinstance(a, np.ndarray)}
    for value in loaded.values():
        if value.nbytes:
            memoryview(value if isinstance(value, dmalane.Tensor) else value.reshape(-1).view("u1"))[:] = bytes(
                value.nbytes
            )
    dmalane.load_into(loaded, path)
    for name, value in loaded.items():
        assert value.tobytes() == tensors[name][2]
        assert name not in addresses or value.ctypes.data == addresses[name]
    buffers = {f"layer.{i:02}": dmalane.Buffer(4 << 20) for i in range(24)}
    dmalane.load_into(buffers, large, memory_limit="16MiB")
    whole = dmalane.load_file(large, framework="bytes")
    assert all(bytes(buffers[name]) == tensor.tobytes() for name, tensor in whole.items())
    with pytest.raises(dmalane.UnknownTensorError) as error:
        dmalane.load_into({**loaded, "more": np.zeros(1)}, path)
    assert error.value.tensor == "more"
    dmalane.load_into({"U8.matrix": loaded["U8.matrix"]}, path, strict=False)
    with pytest.raises(ValueError, match="U8.matrix"):
        dmalane.load_into({**loaded, "U8.matrix": np.zeros((3, 16), "i1")}, path)


def test_a_bad_file_says_where(tmp_path, model):
    path, tensors = model
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(dmalane.FormatError, match="cut.safetensors") as error:
        dmalane.load_file(cut)
    assert error.value.path == str(cut) and error.value.tensor and error.value.offset
    assert isinstance(error.value, ValueError) and isinstance(error.value, dmalane.Error)
    with pytest.raises(dmalane.FileError) as error:
        dmalane.load_file(tmp_path / "missing.safetensors")
    assert error.value.errno == 2 and error.value.path.endswith("missing.safetensors")
    assert isinstance(error.value, FileNotFoundError) and error.value.filename == error.value.path
    # A path that could be the name of a model, too.
    with pytest.raises(FileNotFoundError, match="has no such model") as missing:
        dmalane.load_file("nowhere/model")
    assert isinstance(missing.value, dmalane.FileMissingError) and missing.value.errno == 2
    import copy
    import pickle

    again = pickle.loads(pickle.dumps(error.value))
    assert (type(again), str(again), again.errno) == (type(error.value), str(error.value), 2)
    assert copy.copy(error.value).path == error.value.path


def test_a_file_that_was_replaced_is_refused(tmp_path):
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [4], b"1234"), "b": ("U8", [4], b"5678")})
    with dmalane.safe_open(path) as f:
        assert f.get_tensor("a").tobytes() == b"1234"
        other = write_model(tmp_path / "other", {"b": ("U8", [4], b"5678"), "a": ("U8", [4], b"1234")})
        os.replace(other, path)
        with pytest.raises(dmalane.ChangedError, match="replaced") as error:
            f.get_tensor("a")
        assert error.value.path == str(path) and error.value.before == error.value.size


def test_ctrl_c_ends_a_load(tmp_path):
    """The file is sparse and large, so that the load takes seconds."""
    path = sparse_model(tmp_path / "sparse.safetensors", 3 << 30)
    small = write_model(tmp_path / "small.safetensors", {"t": ("U8", [4], b"1234")})
    program = """
        import sys, time, dmalane
        def load(path):
            {}
        # With all that it imports: CPython ends by the signal at last when that has broken off an `exec` of a string.
        load(sys.argv[2])
        print("ready", flush=True)
        try:
            while True:
                load(sys.argv[1])
        except KeyboardInterrupt:
            print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)
        """
    for call in (
        "dmalane.load_file(path)",
        "next(dmalane.safe_open(path).tensors())",
        "dmalane.safe_open(path).get_tensor('t')",
        "dmalane.load_file(path, device='ram:4GiB')",
    ):
        command = [sys.executable, "-c", textwrap.dedent(program.format(call)), str(path), str(small)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.4)
            sent = time.clock_gettime(time.CLOCK_MONOTONIC)
            process.send_signal(signal.SIGINT)
            ended = float(process.stdout.readline())
            assert process.wait(20) == 0
        # 200 ms on a machine with little else to do; the bound here only tells apart one that waits for the load.
        assert ended - sent < 2, call


def test_closing_ends_the_reads_of_other_threads(tmp_path):
    f = dmalane.safe_open(sparse_model(tmp_path / "sparse.safetensors", 3 << 30), "bytes", direct=False)
    failures = []

    def read():
        try:
            f._files.read([("t", 0, 1 << 30, 0)], 1 << 30)
            f._files.read([("t", 0, 1 << 30, 0)], 1 << 30)
        except dmalane.Error as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.1)
    f.close()
    thread.join()
    assert [type(error) for error in failures] in ([dmalane.CancelledError], [dmalane.ClosedError])


def test_memory_that_is_used_again_shows_nothing_of_before(tmp_path):
    size = 500_001
    path = write_model(tmp_path / "ones.safetensors", {"t": ("U8", [size], b"\xff" * size)})
    with dmalane.safe_open(path, "bytes") as f:
        recycled = 0
        for _ in range(20):
            assert bytes(f.get_tensor("t")) == b"\xff" * size
            buffer = bytes(f._files.read([("t", 0, 100, 4096), ("t", 7, 9, 9000)], size))
            assert buffer.count(0) == size - 102 and buffer[4096:4196] + buffer[9000:9002] == b"\xff" * 102
            assert bytes(f._files.read([], size)) == bytes(size)
            recycled = f.report()["recycled"]
        assert recycled, "nothing was used again"


def test_a_report_has_reference_rates(model, large):
    for path, limit in ((large, None), (model[0], None), (large, "6MiB")):
        with dmalane.safe_open(path, "bytes", memory_limit=limit) as f:
            f.get_tensor(next(iter(f)))
            assert "reference" not in f.report()
            reference = f.report(reference=True)["reference"]
            size = os.path.getsize(path)
            assert reference["bytes"] == (size if limit is None else 6 << 20) and f.report()["memory_used"] == 0
            assert reference["read"] > 0 and reference["first_touch"] > 0
    with dmalane.safe_open(large, "bytes", memory_limit=1) as f:
        assert f.report(reference=True)["reference"] == {}


def test_64_threads_share_an_open_model(model):
    path, tensors = model
    wrong = []
    with dmalane.safe_open(path) as f:

        def work(seed):
            chance = random.Random(seed)
            for name in chance.sample(list(tensors), 20):
                if f.get_tensor(name).tobytes() != tensors[name][2]:
                    wrong.append(name)
                dtype, shape, data = tensors[name]
                if len(shape) == 2 and shape[0] and DTYPES[dtype] == 8:
                    if f.get_slice(name)[1:, 2:5].tobytes() != b"".join(data[r * 16 + 2 : r * 16 + 5] for r in (1, 2)):
                        wrong.append(name)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_sizes():
    for text, size in (("4096", 4096), ("1KiB", 1024), ("1.5 MiB", 3 << 19), ("2GB", 2 * 10**9), (7, 7), (None, None)):
        assert dmalane.parse_size(text) == size
    for bad in ("", "x", "-1", "1XB", "nan"):
        with pytest.raises(ValueError):
            dmalane.parse_size(bad)


def test_nothing_that_is_optional_is_imported():
    done = run("import sys, dmalane; print([m for m in ('numpy', 'torch', 'ml_dtypes', 'tqdm') if m in sys.modules])")
    assert done.stdout == "[]\n", done.stderr
    package = Path(dmalane.__file__).parent
    assert (package / "py.typed").exists()


def test_others_run_while_a_report_looks_into_files(tmp_path):
    """A file that does not open before a lease of it has ended stands for one of a slow file system."""
    path = write_model(tmp_path / "m.safetensors", {"a": ("U8", [4], b"1234")})
    done = run(
        """
        import fcntl, os, resource, signal, sys, threading, time

        # Files are closed where many are open, by this limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        import dmalane

        f = dmalane.safe_open(sys.argv[1])
        others = [dmalane.safe_open(sys.argv[2]) for _ in range(16)]
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        lease = os.open(sys.argv[1], os.O_RDWR)
        fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        timer = threading.Timer(0.1, lambda: fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_UNLCK))
        began = time.monotonic()
        timer.start()
        f.report()
        # The kernel itself ends a lease after 45 s.
        assert 0.1 < time.monotonic() - began < 30
        """,
        path,
        write_model(tmp_path / "other.safetensors", {"b": ("U8", [4], b"1234")}),
    )
    assert done.returncode == 0, done.stderr
