"""Models in the memory of a keeper."""

import ctypes
import subprocess
import sys
import time

import pytest
from package.models import write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")
numpy = pytest.importorskip("numpy", reason="NumPy is not installed")


def model_of(folder, seed):
    """A file of two tensors, of which the second lies badly."""
    values = numpy.random.default_rng(seed)
    tensors = {
        "a": ("F32", [64, 32], values.standard_normal((64, 32), numpy.float32).tobytes()),
        "b": ("U8", [3], bytes([1, 2, seed])),
        "c": ("F32", [5], values.standard_normal(5, numpy.float32).tobytes()),
    }
    path = write_model(folder / "m.safetensors", tensors)
    return path, tensors


def test_it_is_read_once_and_attached_to_afterwards(keeper):
    path, tensors = model_of(keeper, 1)
    first = dmalane.load_file(path, keep=True)
    again = dmalane.load_file(path, keep=True)
    named = dmalane.attach("m")
    verified = dmalane.attach("m", verify=True)
    by_path = dmalane.load_file("kept:m")
    for loaded in (first, again, named, verified, by_path):
        assert {name: array.tobytes() for name, array in loaded.items()} == {
            name: data for name, (_, _, data) in tensors.items()
        }
    assert not named["a"].flags.writeable
    with pytest.raises(ValueError):
        named["a"][0] = 1
    with dmalane.safe_open(path, keep=True, memory_limit=1 << 16) as f:
        assert f.get_tensor("a").tobytes() == tensors["a"][2]
        assert f.get_slice("a")[2:5].tobytes() == tensors["a"][2][2 * 128 : 5 * 128]
        assert f.get_slice("a")[:, 1:3].shape == (64, 2)
        assert f.report()["memory_used"] <= 8192, "kept memory is not counted"
    lent = dmalane.attach("m", "bytes")["a"]
    assert lent.kept and memoryview(lent).readonly


def test_a_file_that_has_changed_is_read_again(keeper):
    path, _ = model_of(keeper, 1)
    before = dmalane.load_file(path, keep=True)
    time.sleep(0.01)
    path, tensors = model_of(keeper, 2)
    after = dmalane.load_file(path, keep=True)
    assert after["b"].tobytes() == tensors["b"][2] and before["b"][2] == 1


def test_a_manifest_is_compared_with_what_is_kept(keeper):
    path, _ = model_of(keeper, 1)
    manifest = dmalane.manifest(path)
    dmalane.load_file(path, keep=True, verify=manifest)
    dmalane.load_file(path, keep=True, verify=manifest)
    region = next(region for region in manifest["files"][0]["regions"] if region.get("name") == "a")
    region["xxh3"] = "0" * 16
    for _ in range(2):
        with pytest.raises(dmalane.IntegrityError, match="a"):
            dmalane.load_file(path, keep=True, verify=manifest)


def test_without_a_keeper_or_a_model_it_is_said(keeper, monkeypatch):
    with pytest.raises(dmalane.KeptError, match="no model 'nothing'|no model \"nothing\""):
        dmalane.attach("nothing")
    monkeypatch.setenv("DMALANE_KEEP", str(keeper / "nobody"))
    for call in (lambda: dmalane.attach("m"), lambda: dmalane.load_file(model_of(keeper, 1)[0], keep=True)):
        with pytest.raises(dmalane.KeptError, match="dmalaned keep starts one.*archive of a release.*cargo install"):
            call()


def test_other_processes_have_the_same_memory(keeper):
    path, tensors = model_of(keeper, 1)
    dmalane.load_file(path, keep=True)
    path.unlink()
    code = "import dmalane, sys; sys.stdout.buffer.write(dmalane.attach('m')['a'].tobytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == tensors["a"][2]


def test_what_is_written_to_a_tensor_of_pytorch_stays_here(keeper):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    path, tensors = model_of(keeper, 1)
    here = dmalane.load_file(path, "pt", keep=True)
    here["a"].zero_()
    assert dmalane.attach("m", "pt")["a"].numpy().tobytes() == tensors["a"][2]
    expected = torch.frombuffer(bytearray(tensors["c"][2]), dtype=torch.float32)
    assert torch.equal(dmalane.attach("m", "pt")["c"], expected)


def test_it_is_read_onto_a_device(keeper):
    path, tensors = model_of(keeper, 1)
    dmalane.load_file(path, keep=True)
    loaded = dmalane.load_file("kept:m", device="ram:4MiB")
    assert {name: tensor.tobytes() for name, tensor in loaded.items()} == {
        name: data for name, (_, _, data) in tensors.items()
    }


def test_memory_of_a_gpu_is_attached_to_as_it_lies(keeper, driver):
    path, tensors = model_of(keeper, 1)
    gpu, program = f"cuda:0,lib={driver.path}", driver.path.with_name("dmalane")
    subprocess.run([program, "keep", path, "-d", gpu, "-q"], check=True, capture_output=True)
    contents = path.read_bytes()
    path.unlink()
    with pytest.raises(dmalane.KeptError, match="kept in memory of GPU-a0a0a0a0"):
        dmalane.attach("m")
    with pytest.raises(dmalane.KeptError, match="cannot lend|take memory of the device"):
        dmalane.attach("m", device="ram:4MiB")
    with pytest.raises(ValueError, match="leave framework out"):
        dmalane.attach("m", "bytes", device=gpu)
    # One of this name in host memory is another model: there is nothing to copy for who wants it on the GPU.
    path.write_bytes(contents)
    dmalane.load_file(path, keep=True)
    path.unlink()
    assert sorted(dmalane.attach("m")) == sorted(dmalane.attach("m", "bytes"))
    lent = dmalane.attach("m", device=gpu, verify=True)
    assert list(lent) == list(tensors)
    for name, (_, shape, data) in tensors.items():
        assert list(lent[name].shape) == shape
        assert lent[name].tobytes() == data
        assert driver.read(lent[name].address, min(len(data), 4096)) == data[:4096]
    assert driver.control("copied") == 0, "nothing is copied onto the GPU"
    # A program that writes to it gets an error of the driver.
    page, size = ctypes.c_uint64(driver.page_at), ctypes.c_size_t(4)
    to = ctypes.c_uint64(lent["a"].address)
    assert driver.library.cuMemcpyHtoDAsync_v2(to, page, size, driver.stream) == 1
    with pytest.raises(BufferError, match="legacy"):
        lent["a"].__dlpack__()
    assert lent["a"].__dlpack__(max_version=(1, 1)) is not None
