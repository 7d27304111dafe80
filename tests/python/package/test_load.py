"""Loading: tensors that own their memory, bit for bit those of the format's own library."""

import ctypes
import gc
import json
import mmap
import os
import re
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import safetensors
from package.models import random_tensors, write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")

PACKED = {"F4", "F6_E2M3", "F6_E3M2"}


def raw(value):
    return value.tobytes()


def maps_of(address):
    """The line of smaps for the mapping that holds an address."""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ (\S+) (\d+) *(.*)", line)
            if found and int(found[1], 16) <= address < int(found[2], 16):
                return found
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("framework", ["numpy", "bytes"])
@pytest.mark.parametrize("align", [None, 64, 4096])
@pytest.mark.parametrize("direct", [None, True, False])
def test_every_type_is_what_the_format_s_library_reads(model, framework, align, direct):
    path, tensors = model
    with safetensors.safe_open(path, framework="numpy") as theirs:
        assert list(theirs.offset_keys()) == list(tensors)
    # The library's own view of the bytes, for every type.
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    ours = dmalane.load_file(path, framework=framework, align=align, direct=direct)
    assert list(ours) == list(tensors)
    for name, (dtype, shape, data) in tensors.items():
        value = ours[name]
        assert raw(value) == bytes(theirs[name]["data"]) == data, name
        assert list(value.shape) == theirs[name]["shape"] == shape, name
        if isinstance(value, dmalane.Tensor):
            assert value.dtype == theirs[name]["dtype"] == dtype
            assert memoryview(value).tobytes() == data
        if framework == "numpy":
            assert isinstance(value, np.ndarray) == (dtype not in PACKED), name
        if align and isinstance(value, dmalane.Tensor) and data:
            assert value.address % align == 0


def test_numpy_types_are_those_of_safetensors_numpy(tmp_path):
    from safetensors.numpy import load_file, save_file

    arrays = {
        np.dtype(t).name: np.arange(12).astype(t).reshape(3, 4)
        for t in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "bool", "c8")
    }
    path = tmp_path / "numpy.safetensors"
    save_file(arrays, path)
    theirs, ours = load_file(path), dmalane.load_file(path)
    assert theirs.keys() == ours.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype and np.array_equal(ours[name], array)
        assert ours[name].flags.writeable and ours[name].flags.aligned
        ours[name][...] = array


def test_a_real_model_is_that_of_safetensors_numpy(minilm):
    from safetensors.numpy import load_file

    theirs, ours = load_file(minilm), dmalane.load_file(minilm)
    assert theirs.keys() == ours.keys() and len(ours) > 100
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype and np.array_equal(ours[name], array), name


def test_where_there_can_be_no_more_threads(large):
    code = (
        "import sys, dmalane\nfound = dmalane.load_file(sys.argv[1])\nprint(len(found))\n"
        "try: dmalane.load_into({name: array.copy() for name, array in found.items()}, sys.argv[1])\n"
        "except OSError as error: print(error)"
    )
    # No thread can have a stack of so many bytes.
    environment = os.environ | {"RUST_MIN_STACK": str(1 << 60)}
    command = [sys.executable, "-c", code, str(large)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert int(first) > 1 and "cannot start a thread that reads it" in second


def test_without_numpy_it_is_said_what_to_install(model, monkeypatch):
    path, tensors = model
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ModuleNotFoundError, match="pip install numpy"):
        dmalane.load_file(path)
    assert dmalane.load_file(path, framework="bytes").keys() == tensors.keys()


def test_without_pytorch_or_tqdm_it_is_said_what_to_install(model, monkeypatch):
    import dmalane.plan
    import dmalane.torch

    path, _ = model
    for name in ("torch", "tqdm"):
        monkeypatch.setitem(sys.modules, name, None)
    for load in (
        lambda: dmalane.load_file(path, "pt"),
        lambda: dmalane.safe_open(path, "pt", "cuda"),
        lambda: dmalane.torch.load_file(path),
        lambda: dmalane.torch.load(path.read_bytes()),
        lambda: next(iter(dmalane.plan.tensors(path, {}))),
    ):
        with pytest.raises(ModuleNotFoundError, match="PyTorch: pip install torch") as error:
            load()
        assert error.value.name == "torch"
    with pytest.raises(ModuleNotFoundError, match="pip install tqdm"):
        dmalane.load_file(path, progress=True)


def test_without_ml_dtypes_it_is_said_once_what_comes_instead(model, monkeypatch):
    path, tensors = model
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.warns(UserWarning) as warned:
        loaded = dmalane.load_file(path)
    assert isinstance(loaded["BF16.matrix"], dmalane.Tensor) and raw(loaded["BF16.matrix"]) == tensors["BF16.matrix"][2]
    said = [str(one.message) for one in warned]
    assert sum("type BF16 come as dmalane.Tensor" in text for text in said) == 1
    assert len(said) == len(set(said)) == 6 and all("pip install ml_dtypes" in text for text in said)


def test_ml_dtypes_are_used_where_they_are(model):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    path, tensors = model
    ours = dmalane.load_file(path)
    for name, dtype in (("BF16", "bfloat16"), ("F8_E4M3", "float8_e4m3fn"), ("F8_E8M0", "float8_e8m0fnu")):
        assert ours[f"{name}.matrix"].dtype == np.dtype(getattr(ml_dtypes, dtype))


@pytest.mark.parametrize("pad", [1, 3, 5, 7])
def test_elements_are_aligned_wherever_the_file_has_them(tmp_path, pad):
    tensors = random_tensors(pad)
    odd = {"first": ("U8", [3], b"abc"), **tensors, "last": ("F64", [1], b"12345678")}
    path = write_model(tmp_path / "odd.safetensors", odd, pad=pad)
    for direct in (None, True):
        for name, value in dmalane.load_file(path, direct=direct).items():
            assert raw(value) == odd[name][2]
            assert not isinstance(value, np.ndarray) or value.flags.aligned, name


def test_dlpack_shares_the_memory(model):
    path, tensors = model
    ours = dmalane.load_file(path, framework="bytes")
    shared = np.from_dlpack(ours["F32.matrix"])
    assert shared.tobytes() == tensors["F32.matrix"][2] and shared.shape == (3, 16)
    assert shared.ctypes.data == ours["F32.matrix"].address
    memoryview(ours["F32.matrix"])[:4] = b"\0\0\x80?"
    assert shared[0, 0] == 1
    assert np.from_dlpack(ours["I64.scalar"]).shape == ()
    for packed in PACKED:
        with pytest.raises(BufferError, match="packed"):
            ours[f"{packed}.matrix"].__dlpack__()
    with pytest.raises(BufferError):
        ours["F32.matrix"].__dlpack__(copy=True)
    assert ours["F32.matrix"].__dlpack_device__() == (1, 0)


def test_no_tensor_is_a_file_mapping(large, model):
    for path in (large, model[0]):
        for name, tensor in dmalane.load_file(path, framework="bytes").items():
            found = maps_of(tensor.address)
            # Anonymous memory, of which reserved huge pages alone have a name.
            assert found[6] in ("", "/anon_hugepage (deleted)"), (name, found[0])
            assert found[4] == "00:00" or "hugepage" in found[6]
        array = next(a for a in dmalane.load_file(path).values() if isinstance(a, np.ndarray) and a.size)
        assert maps_of(array.ctypes.data)[6] in ("", "/anon_hugepage (deleted)")
    # The control: what a mapping of a file looks like.
    with open(large, "rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ) as mapped:
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        assert maps_of(address)[6].endswith("large.safetensors")
        gc.collect()


def test_memory_lives_as_long_as_its_last_array(model):
    path, tensors = model
    loaded = dmalane.load_file(path, framework="bytes")
    tensor = loaded.pop("F32.matrix")
    gone = weakref.ref(loaded["U8.matrix"])
    del loaded
    gc.collect()
    assert gone() is None
    view, array = memoryview(tensor), np.from_dlpack(tensor)
    with pytest.raises(BufferError, match="1 buffers"):
        tensor.release()
    died = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert died() is not None, "the view holds it"
    assert view.tobytes() == tensors["F32.matrix"][2]
    view.release()
    gc.collect()
    assert died() is None
    assert array.tobytes() == tensors["F32.matrix"][2], "DLPack holds the memory"


def test_a_released_tensor_gives_nothing(model):
    tensor = dmalane.load_file(model[0], framework="bytes")["F32.matrix"]
    tensor.release()
    assert tensor.released
    for use in (lambda: memoryview(tensor), tensor.tobytes, tensor.__dlpack__, lambda: tensor.address):
        with pytest.raises((dmalane.ClosedError, BufferError)):
            use()
    tensor.release()


def test_memory_comes_back(large):
    def resident():
        with open("/proc/self/status") as lines:
            status = dict(line.split(":", 1) for line in lines)
        return sum(int(status[key].split()[0]) for key in ("RssAnon", "HugetlbPages"))

    dmalane.load_file(large)
    gc.collect()
    before = resident()
    for _ in range(5):
        dmalane.load_file(large)
    gc.collect()
    assert resident() - before < 32 << 10


def test_shards_directories_and_indices(tmp_path):
    weights = {}
    for shard in range(1000):
        name = f"t{shard:04}"
        write_model(tmp_path / f"m-{shard:04}.safetensors", {name: ("I32", [1], shard.to_bytes(4, "little"))})
        weights[name] = f"m-{shard:04}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        loaded = dmalane.load_file(path)
        assert {name: int(value[0]) for name, value in loaded.items()} == {n: int(n[1:]) for n in weights}
    assert len(dmalane.last_report()["files"]) == 1000
    some = [tmp_path / "m-0001.safetensors", str(tmp_path / "m-0007.safetensors")]
    assert list(dmalane.load_file(some)) == ["t0001", "t0007"]


def test_a_name_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        write_model(tmp_path / f"{name}.safetensors", {"same": ("U8", [1], b"x")})
    with pytest.raises(dmalane.FormatError, match="too") as error:
        with dmalane.safe_open([tmp_path / "a.safetensors", tmp_path / "b.safetensors"]):
            pass
    assert error.value.tensor == "same" and error.value.path.endswith("b.safetensors")
    # Of a folder nobody knows which of them is meant.
    with pytest.raises(dmalane.FileError, match="several models: name the files of one of a.safetensors, b.safe"):
        dmalane.load_file(tmp_path)


def test_files_that_are_no_part_of_a_model_are_left_out(tmp_path):
    write_model(tmp_path / "model.safetensors", {"w": ("U8", [1], b"x")})
    write_model(tmp_path / "model.fp16.safetensors", {"w": ("U8", [1], b"y")})
    assert bytes(dmalane.load_file(tmp_path)["w"]) == b"x"
    left_out = dmalane.last_report()["left_out"]
    assert [(path.rsplit("/", 1)[1], why) for path, why in left_out] == [
        ("model.fp16.safetensors", "a variant of model")]  # fmt: skip
    on_device = dmalane.load_file(tmp_path, device="ram:1MiB")
    assert list(on_device) == ["w"] and dmalane.last_report()["left_out"] == left_out


def test_gguf_numpy_and_raw_files(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "test")
    array = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("plain", array)
    writer.add_tensor("quantized", gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = dmalane.load_file(tmp_path / "m.gguf")
    assert loaded["plain"].tobytes() == array.tobytes()
    quantized = loaded["quantized"]
    assert isinstance(quantized, dmalane.Tensor) and quantized.dtype == "Q8_0" and quantized.nbytes == 68
    np.save(tmp_path / "array.npy", array)
    assert np.array_equal(dmalane.load_file(tmp_path / "array.npy")["array"], array)
    np.save(tmp_path / "columns.npy", np.asfortranarray(array))
    with pytest.raises(dmalane.FormatError, match="by columns"):
        dmalane.load_file(tmp_path / "columns.npy")
    assert loaded["plain"].shape == (2, 32)


def test_a_tensor_is_copied_and_pickled(model):
    import copy
    import pickle

    for tensor in dmalane.load_file(model[0], framework="bytes").values():
        for again in (copy.copy(tensor), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
            assert repr(again) == repr(tensor) and again.tobytes() == tensor.tobytes()
            assert again.address != tensor.address or not tensor.nbytes
    tensor.release()
    with pytest.raises(dmalane.ClosedError):
        copy.copy(tensor)
    on_device = dmalane.load_file(model[0], device="ram:1MiB")
    with pytest.raises(TypeError, match="tobytes"):
        pickle.dumps(on_device["U8.matrix"])


def test_the_report_says_how_and_why(large):
    dmalane.load_file(large)
    report = dmalane.last_report()
    assert report["bytes"] == 96 << 20 and report["wall_s"] > 0
    assert {"read"} <= {stage["stage"] for stage in report["stages"]}
    (file,) = report["files"]
    assert file["path"] == str(large) and file["reason"]
    assert file["direct_bytes"] + file["buffered_bytes"] == 96 << 20
    assert report["pages"]["kind"]
    dmalane.load_file(large, direct=False)
    (file,) = dmalane.last_report()["files"]
    assert file["direct_bytes"] == 0 and file["reason"] == "buffered I/O was asked for"


def test_the_report_is_of_this_thread(large):
    dmalane.load_file(large)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(dmalane.last_report()))
    thread.start()
    thread.join()
    assert seen == [None] and dmalane.last_report()


def test_progress(large):
    calls = []
    dmalane.load_file(large, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (96 << 20, 96 << 20)
    assert all(a[0] <= b[0] for a, b in zip(calls, calls[1:]))
    pytest.importorskip("tqdm")
    dmalane.load_file(large, progress=True)

    def stop(done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        dmalane.load_file(large, progress=stop)


def test_64_threads_load_and_drop(model):
    path, tensors = model
    wrong = []

    def work():
        for _ in range(5):
            for name, value in dmalane.load_file(path).items():
                if value.tobytes() != tensors[name][2]:
                    wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_other_threads_run_meanwhile(large):
    ticks, go = [], threading.Event()

    def tick():
        while not go.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    for _ in range(3):
        dmalane.load_file(large)
    end = time.perf_counter()
    go.set()
    thread.join()
    assert sum(begin < t < end for t in ticks) >= 3


def test_a_device_holds_the_tensors_until_they_die(model):
    path, tensors = model
    device = dmalane.open("soft")
    free = device.info()["free_bytes"]
    loaded = dmalane.load_file(path, device=device)
    assert device.info()["free_bytes"] < free
    for name, (dtype, shape, data) in tensors.items():
        assert (loaded[name].dtype, list(loaded[name].shape), loaded[name].tobytes()) == (dtype, shape, data)
        assert (loaded[name].address is None) == (not data)
    assert dmalane.last_report()["bytes"] == path.stat().st_size
    last = loaded["F32.matrix"]
    del loaded
    assert last.tobytes() == tensors["F32.matrix"][2]
    del last
    gc.collect()
    assert device.info()["free_bytes"] == free
    assert dmalane.load_file(path, device="ram:16MiB")["U8.matrix"].tobytes() == tensors["U8.matrix"][2]
    with pytest.raises(dmalane.DeviceError):
        dmalane.load_file(path, device="nonsense")
    for options in ({"align": 4096}, {"memory_limit": "1GiB"}, {"direct": True}, {"framework": "bytes"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            dmalane.load_file(path, device="ram:16MiB", **options)


def test_a_load_that_was_stopped_leaves_nothing_on_the_device(large):
    device = dmalane.open("soft")
    free = device.info()["free_bytes"]

    def stop(done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        dmalane.load_file(large, device=device, progress=stop)
    gc.collect()
    assert device.info()["free_bytes"] == free
    assert len(dmalane.load_file(large, device=device)) == 24


def test_device_memory():
    device = dmalane.open("soft")
    a, b = device.alloc(1 << 20), device.alloc(1 << 20)
    buffer = dmalane.Buffer(1 << 20)
    memoryview(buffer)[:5] = b"hello"
    device.write(a, buffer)
    device.copy(a, b, 1 << 20)
    assert device.read(b, 6) == b"hello\0"
    device.write(b, b"again")
    assert device.read(b, 6) == b"again\0"
    # Whatever has bytes, in several blocks.
    numbers = np.arange(3 << 18, dtype="<u4").reshape(3, -1)
    large = device.alloc(numbers.nbytes)
    device.write(large, numbers)
    assert device.read(large, numbers.nbytes) == numbers.tobytes()
    with pytest.raises(dmalane.OutOfMemoryError):
        device.alloc(1 << 60)


def test_buffers(tmp_path):
    for align in (1, 4096, 65536, 2 << 20):
        for huge in (True, False):
            buffer = dmalane.Buffer(100_000, align=align, huge=huge)
            assert buffer.address % align == 0 and buffer.nbytes == len(buffer) == 100_000
            assert maps_of(buffer.address)[6] in ("", "/anon_hugepage (deleted)")
            assert bytes(buffer) == bytes(100_000)
            memoryview(buffer)[99_999] = 7
            assert ctypes.string_at(buffer.address + 99_999, 1) == b"\7"
    for size, align in ((0, 4096), (10, 3), (10, 4 << 20)):
        with pytest.raises(ValueError):
            dmalane.Buffer(size, align=align)
    with pytest.raises((dmalane.OutOfMemoryError, ValueError)):
        dmalane.Buffer(1 << 62)
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 1000)
    buffer = dmalane.alloc_and_read(path)
    assert bytes(buffer) == path.read_bytes() and dmalane.last_report()["bytes"] == 256_000
    assert bytes(dmalane.alloc_and_read(path, 100, 1100)) == path.read_bytes()[100:1100]
    with pytest.raises(dmalane.ChangedError):
        dmalane.alloc_and_read(path, 0, 256_001)


def test_arguments_of_another_kind_are_refused(model):
    path = model[0]
    for wrong in (None, 3, b"m.safetensors", [b"m.safetensors"], {"a": 1}, [3]):
        with pytest.raises(TypeError):
            dmalane.load_file(wrong)
    with open(path, "rb") as file, pytest.raises(TypeError, match="not bytes$"):
        dmalane.load_file(file)
    for limit, error in ((1e9, TypeError), (-1, ValueError), ("-1", ValueError), ("many", ValueError)):
        with pytest.raises(error):
            dmalane.load_file(path, memory_limit=limit)
    with pytest.raises(ValueError, match='none of "numpy"'):
        dmalane.load_file(path, framework="jax")
    with pytest.raises(FileExistsError) as refused:
        dmalane.save_file({}, path, overwrite=False)
    assert (refused.value.errno, refused.value.strerror) == (17, "File exists")


def test_a_path_that_is_not_there_is_told_as_it_is(tmp_path):
    path = write_model(tmp_path / "model-00001-of-00002.safetensors", {"w": ("U8", [1], b"1")})
    missing = tmp_path / "model-00002-of-00002.safetensors"
    for read in (dmalane.load_file, dmalane.safe_open, dmalane.manifest, dmalane.alloc_and_read):
        with pytest.raises(dmalane.FileMissingError) as error:
            read(missing)
        # Its neighbour is another file, and not the one that was meant.
        assert error.value.errno == 2 and missing.name in str(error.value) and path.name not in str(error.value)
    with pytest.raises(dmalane.FormatError, match="this is no manifest, but a safetensors file"):
        dmalane.load_file(path, verify=path)


def test_memory_that_is_longer_than_a_file_takes_one_that_is_cached_in_part(tmp_path):
    """A block that was used before may be an eighth too long: a chunk of it then begins behind the file's end."""
    data = os.urandom(4_100_000)
    before = write_model(tmp_path / "before.safetensors", {"t": ("U8", [4_600_000], bytes(4_600_000))})
    path = write_model(tmp_path / "m.safetensors", {"t": ("U8", [len(data)], data)})
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(file.fileno(), 1 << 20, 0)
    dmalane.load_file(before)
    assert dmalane.load_file(path)["t"].tobytes() == data
