"""In place of safetensors: the same names, orders, devices and answers."""

import inspect
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors
from package.models import write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")


@pytest.fixture
def file(tmp_path):
    tensors = {
        "a": ("F32", [4, 6], np.arange(24, dtype="f4").tobytes()),
        "b": ("I64", [3], np.arange(3).tobytes()),
        "s": ("F32", [], b"\0\0\x80?"),
    }
    return str(write_model(tmp_path / "m.safetensors", tensors, {"format": "pt"}))


def test_the_signature_of_safe_open(file):
    named = list(inspect.signature(dmalane.safe_open).parameters)
    assert named[:4] == ["filename", "framework", "device", "backend"]
    theirs = inspect.signature(safetensors.safe_open)
    assert set(theirs.parameters) <= set(named)
    for backend in ("mmap", "pread"):
        with dmalane.safe_open(filename=file, framework="np", device="cpu", backend=backend) as f:
            assert f.metadata() == {"format": "pt"} and list(f.keys()) == f.offset_keys() == ["a", "b", "s"]
            assert f.get_tensors()["b"].tolist() == [0, 1, 2]
    for wrong in ("gds", None, 3):
        with pytest.raises(ValueError, match="'mmap', 'pread'"):
            dmalane.safe_open(file, backend=wrong)


def test_a_tensor_s_place_is_that_of_the_header(file):
    with dmalane.safe_open(file) as f:
        meta = f.get_tensor_meta("b")
        assert (meta.dtype, meta.shape, meta.data_offsets) == ("I64", [3], (96, 120))
        assert f.get_tensor_meta("a").data_offsets == (0, 96)
        if hasattr(safetensors.safe_open, "get_tensor_meta"):
            theirs = safetensors.safe_open(file, "np").get_tensor_meta("s")
            assert f.get_tensor_meta("s").data_offsets == theirs.data_offsets
        with pytest.raises(dmalane.UnknownTensorError, match="did you mean 'a'"):
            f.get_tensor_meta("aa")


def test_errors_are_those_of_safetensors_too(file, tmp_path):
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"12345678 and no header")
    mine, theirs = dmalane.safe_open(file), safetensors.safe_open(file, "np")
    for kind, use in (
        (dmalane.FormatError, lambda f: type(f)(bad, "np")),
        (dmalane.UnknownTensorError, lambda f: f.get_tensor("z")),
        (dmalane.UnknownTensorError, lambda f: f.get_slice("z")),
        (dmalane.ClosedError, lambda f: f.__exit__(None, None, None) or f.get_tensor("a")),
    ):
        with pytest.raises(safetensors.SafetensorError):
            use(theirs)
        with pytest.raises(safetensors.SafetensorError) as error:
            use(mine)
        assert isinstance(error.value, kind) and error.typename == kind.__name__
        again = pickle.loads(pickle.dumps(error.value))
        assert type(again) is type(error.value) and vars(again) == vars(error.value)
    with pytest.raises(dmalane.FormatError) as error:
        dmalane.load_file(bad)
    assert isinstance(error.value, safetensors.SafetensorError) and error.value.path == str(bad)
    # Who has not imported it cannot mean its errors, and pays nothing.
    code = (
        "import sys, dmalane\ntry: dmalane.load_file(sys.argv[1])\n"
        "except dmalane.FormatError as e: print(type(e) is dmalane.FormatError, 'safetensors' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(bad)], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_slices_are_those_of_numpy_and_safetensors(file):
    whole = np.arange(24, dtype="f4").reshape(4, 6)
    with dmalane.safe_open(file) as f, safetensors.safe_open(file, "np") as theirs:
        ours, other = f.get_slice("a"), theirs.get_slice("a")
        assert ours.get_shape() == other.get_shape() and ours.get_dtype() == other.get_dtype()
        for index in np.s_[0], np.s_[2:, 1:6:1], np.s_[3:1], np.s_[..., 2:3], np.s_[::1]:
            assert np.array_equal(ours[index], whole[index])
            # Which fails where nothing is left.
            assert not whole[index].size or np.array_equal(other[index], whole[index])
        assert np.array_equal(ours[-2:, -1], whole[-2:, -1]) and f.get_slice("s")[...] == 1
        for wrong, error in (
            (np.s_[::2], IndexError), (9, IndexError), ((0, 0, 0), IndexError), ([1, 2], TypeError), (None, TypeError),
            (True, TypeError), (1.0, TypeError),
        ):  # fmt: skip
            with pytest.raises(error):
                ours[wrong]


def test_prefetch_hands_out_each_tensor_once(file):
    with dmalane.safe_open(file) as f:
        with f.prefetch(threads=2) as ahead:
            assert ahead.names() == ["a", "b", "s"] and len(ahead) == 3
            assert ahead.take("b").tolist() == [0, 1, 2]
            assert [name for name, _ in ahead] == ["a", "s"] and repr(ahead) == "<Prefetch of 3 tensors, 0 not taken>"
            with pytest.raises(KeyError, match="taken"):
                ahead.take("b")
        ahead = f.prefetch({"a": slice(1, 3), "s": None})
        assert {name: value.shape for name, value in ahead} == {"a": (2, 6), "s": ()}
        ahead.close()
        part = np.arange(24.0).reshape(4, 6)[1:3, 2:]
        for threads in (None, 1):
            (found,) = dict(f.prefetch({"a": (slice(1, 3), slice(2, None))}, threads=threads)).values()
            assert np.array_equal(found, part)
        for plan in ({"a": slice(0, 4, 2)}, {"s": slice(0, 1)}, {"a": 3}, {"a": (slice(1), slice(1), slice(1))}):
            with pytest.raises(ValueError, match="slice"):
                f.prefetch(plan)
        with pytest.raises(dmalane.UnknownTensorError):
            f.prefetch({"c": None})
        with pytest.raises(ValueError, match="threads"):
            f.prefetch(threads=0)
        with pytest.raises(ValueError, match='framework="pt"'):
            f.prefetch(device="cuda:0")


@pytest.mark.parametrize("direct", [True, False])
def test_prefetch_reads_with_as_many_threads_as_it_is_told(large, direct):
    """Each of them a block at a time, as safetensors has it; else as many reads at once as make the bytes come
    faster."""
    for threads in (1, 3, None):
        with dmalane.safe_open(large, "bytes", direct=direct) as f, f.prefetch(threads=threads) as ahead:
            assert len(dict(ahead)) == 24
            report = f.report()
        (reads,) = (stage["in_flight"] for stage in report["stages"] if stage["stage"] == "read")
        assert threads is None or (report["workers"], reads) == (threads, reads) and 1 <= reads <= threads, report
    if all(file["direct"] for file in report["files"]):
        assert reads > 3, "threads bound it"


def test_a_plan_of_parts_has_one_read_at_a_time_where_threads_are_given(large):
    class Counted:
        """Files of which each read is under way for a while."""

        now = most = 0

        def __init__(self, files):
            self.files = files

        def __getattr__(self, name):
            return getattr(self.files, name)

        def apart(self, threads):
            return Counted(self.files.apart(threads))

        def stream(self, names):
            # It reads ahead until it is closed.
            Counted.now += names is None or len(names) > 0
            return self.files.stream(names)

        def slice(self, *part):
            return self.read(self.files.slice, *part)

        def get(self, name):
            return self.read(self.files.get, name)

        def read(self, of, *arguments):
            Counted.now += 1
            Counted.most = max(Counted.most, Counted.now)
            time.sleep(0.01)
            Counted.now -= 1
            return of(*arguments)

    for threads, most in ((None, 2), (1, 1)):
        with dmalane.safe_open(large, "bytes") as f:
            Counted.now = Counted.most = 0
            f._files = Counted(f._files)
            plan = {name: slice(0, 9) if n % 2 else None for n, name in enumerate(f)}
            with f.prefetch(plan, threads=threads) as ahead:
                assert [tensor.shape[0] for _, tensor in ahead] == [1024, 9] * 12
        assert Counted.most == most


def test_prefetch_begins_at_once(file):
    with dmalane.safe_open(file) as f, f.prefetch():
        until = time.monotonic() + 30
        while not f.report()["bytes"]:
            assert time.monotonic() < until, "nothing is read before it is asked for"
            time.sleep(0.01)


def test_what_prefetch_could_not_give_can_be_asked_for_again(file, tmp_path):
    """And is no end of an iteration, which `map` would take for that of its names."""
    manifest = dmalane.manifest(file)
    data = bytearray(Path(file).read_bytes())
    data[-1] ^= 1
    changed = tmp_path / "changed" / "m.safetensors"
    changed.parent.mkdir()
    changed.write_bytes(data)
    with dmalane.safe_open(changed, verify=manifest) as f, f.prefetch() as ahead:
        for _ in range(2):
            with pytest.raises(dmalane.IntegrityError):
                list(map(ahead.take, ["s"]))
        assert [value.size for value in map(ahead.take, ["a", "b"])] == [24, 3]
    with dmalane.safe_open(file, memory_limit=4096) as f:
        lent = f.get_tensor("a")
        ahead = f.prefetch({"a": slice(0, 2)})
        with pytest.raises(dmalane.MemoryLimitError):
            ahead.take("a")
        del lent
        assert ahead.take("a").shape == (2, 6)


def test_the_bytes_of_a_file_are_loaded(file):
    with open(file, "rb") as opened:
        data = opened.read()
    for given in (data, bytearray(data), memoryview(data)):
        assert dmalane.load(given)["a"].tolist() == np.arange(24.0).reshape(4, 6).tolist()
    assert dmalane.load(data, "bytes")["s"].tobytes() == b"\0\0\x80?"
    with pytest.raises(dmalane.FormatError, match="^data: .*ZIP"):
        dmalane.load(b"PK\x03\x04" + bytes(60))
    with pytest.raises(TypeError, match="load_file"):
        dmalane.load(file)


def test_one_order_and_one_name(file):
    for one in (dmalane.load_file, dmalane.safe_open):
        assert list(inspect.signature(one).parameters)[:3] == ["filename", "framework", "device"]
    for one in (dmalane.load_into, dmalane.save_file):
        assert list(inspect.signature(one).parameters)[1] == "filename"
    for one in (dmalane.manifest, dmalane.verify, dmalane.alloc_and_read):
        assert list(inspect.signature(one).parameters)[0] == "filename"
    assert dmalane.load_file(file, "bytes")["b"].dtype == "I64"
    with pytest.raises(ValueError, match="device='soft'"):
        dmalane.load_file(file, "soft")
    with pytest.raises(ValueError, match="framework='pt'"):
        dmalane.load_file(file, device="pt")
    with pytest.raises(TypeError, match="framework"):
        dmalane.load_file(file, 3)
    with pytest.raises(ValueError, match="no file names"):
        dmalane.load_file([])
    for wrong in (None, 3, b"x"):
        for call in (dmalane.alloc_and_read, dmalane.safe_open, lambda name: dmalane.save_file({}, name)):
            with pytest.raises(TypeError, match="file name"):
                call(wrong)
    for wrong in (1e9, True, b"1"):
        with pytest.raises(TypeError, match="256MiB"):
            dmalane.safe_open(file, memory_limit=wrong)


def test_the_host_has_two_names_and_cuda_a_number(file):
    assert dmalane.load_file(file, device="cpu:0").keys() == {"a", "b", "s"}
    for device in ("cuda", 0, "cuda:0"):
        with pytest.raises(dmalane.DeviceError, match="(?i)cuda"):
            raise dmalane.DeviceError(f"cuda: {dmalane.load_file(file, device=device)}")
    with pytest.raises(TypeError, match="number of CUDA"):
        dmalane.open(1.5)
    with pytest.raises(ValueError, match='framework="pt"'):
        dmalane.safe_open(file, device="cuda:0")


def test_devices_of_pytorch(file):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import dmalane.torch
    for device in ("cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
        with dmalane.safe_open(file, "pt", device) as f:
            assert f.get_tensor("b").tolist() == [0, 1, 2]
        assert dmalane.load_file(file, "pt", device)["b"].device.type == "cpu"
        assert dmalane.torch.load_file(file, device, backend="pread")["b"].device.type == "cpu"
        assert dmalane.load_file(file, device=device)["b"].tolist() == [0, 1, 2]
    # A device that every PyTorch has, and moves to.
    for meta in ("meta", torch.device("meta")):
        seen = []
        moved = dmalane.load_file(file, "pt", meta, memory_limit="1MiB", progress=lambda *now: seen.append(now))
        assert {tensor.device.type for tensor in moved.values()} == {"meta"} and seen[-1] == (124, 124)
        with dmalane.safe_open(file, "pt", meta) as f:
            assert f.get_slice("a")[1:].device.type == f.prefetch().take("s").device.type == "meta"
    for wrong, error in (("soft", ValueError), ("cuda:x", ValueError), (1.5, TypeError), (None, TypeError)):
        for load in (dmalane.torch.load_file, lambda name, device: dmalane.load_file(name, "pt", device)):
            with pytest.raises(error, match="device"):
                load(file, wrong)
    if not torch.cuda.is_available():
        for device in ("cuda", 0, torch.device("cuda", 0)):
            with pytest.raises((RuntimeError, AssertionError)):
                dmalane.load_file(file, "pt", device)


def test_a_module_with_tied_weights_is_saved_and_loaded(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import dmalane.torch
    import safetensors.torch

    def made():
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
        model[1].weight = model[0].weight
        return model

    model, ours, theirs = made(), tmp_path / "ours", tmp_path / "theirs"
    dmalane.torch.save_model(model, ours, {"format": "pt"})
    safetensors.torch.save_model(model, str(theirs), {"format": "pt"})
    with safetensors.safe_open(ours, "pt") as f, safetensors.safe_open(theirs, "pt") as other:
        assert f.metadata() == other.metadata() == {"format": "pt", "1.weight": "0.weight"}
        assert f.keys() == other.keys() and ours.stat().st_size == theirs.stat().st_size
    for load in (dmalane.torch.load_model, safetensors.torch.load_model):
        other = made()
        assert tuple(map(list, load(other, str(ours)))) == ([], [])
        assert torch.equal(other[1].weight, model[0].weight) and torch.equal(other[1].bias, model[1].bias)
    with pytest.raises(RuntimeError, match="missing in the file: 2.weight"):
        dmalane.torch.load_model(torch.nn.Sequential(*made(), torch.nn.Linear(8, 2, bias=False)), ours)
    found = dmalane.torch.load_model(torch.nn.Sequential(torch.nn.Embedding(8, 4)), ours, strict=False)
    assert found == ([], ["1.bias"])
    # The half of a weight is not the whole, which is the half.
    halves = torch.nn.Module()
    halves.whole = torch.nn.Parameter(torch.zeros(2, 4))
    halves.upper = torch.nn.Parameter(halves.whole.data[0])
    half, whole = tmp_path / "upper", tmp_path / "whole"
    dmalane.torch.save_file({"upper": torch.ones(4)}, half)
    dmalane.torch.save_file({"whole": torch.ones(2, 4)}, whole)
    with pytest.raises(RuntimeError, match="missing in the file: whole"):
        dmalane.torch.load_model(halves, half)
    assert dmalane.torch.load_model(halves, whole) == ([], [])
    block = torch.zeros(8)
    with pytest.raises(RuntimeError, match="'x', 'y' share memory.*save_model"):
        dmalane.torch.save_file({"x": block[:5], "y": block[4:]}, tmp_path / "z")
    # Parts that do not meet may be saved.
    dmalane.torch.save_file({"x": block[:4], "y": block[4:]}, tmp_path / "z")
    assert dmalane.torch.load((tmp_path / "z").read_bytes())["y"].shape == (4,)


def test_files_that_are_no_models_are_refused_by_what_they_are(tmp_path):
    blobs = {
        "pytorch_model.bin": (b"PK\x03\x04" + bytes(60), "a ZIP file"),
        "old.pt": (b"\x80\x02}q\0X" + bytes(60), "a pickle"),
        "a.npz": (b"PK\x03\x04" + bytes(60), "a ZIP file"),
        "config.json": (b'{"model_type": "llama"}', "a JSON text"),
        "other.bin": (b"some bytes, 32 of them, at least", "no file of a known kind \\(safetensors, "),
    }
    for name, (data, what) in blobs.items():
        path = tmp_path / name
        path.write_bytes(data)
        for load in (
            dmalane.load_file,
            dmalane.safe_open,
            lambda path: dmalane.load_file(path, device="soft"),
            lambda path: dmalane.load_file(path, device=dmalane.open("ram:1MiB")),
            lambda path: dmalane.load_into({}, path),
            lambda path: dmalane.load(path.read_bytes()),
        ):
            with pytest.raises(dmalane.FormatError, match=f"this is {what}"):
                load(path)
        assert bytes(dmalane.alloc_and_read(path)) == data


def test_a_pickle_that_lies_about_its_shape_is_refused():
    for shape in ([1_000_000], [2**63, 4], [5]):
        with pytest.raises(ValueError, match="4 bytes are no tensor of type F32 and shape"):
            dmalane._native.remade_tensor("x", "F32", shape, b"1234")
