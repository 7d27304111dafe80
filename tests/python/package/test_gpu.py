"""Tensors of PyTorch on a GPU: equal to the files', and copied from memory that is registered once.

The driver in software refuses copies from memory that is not registered, and the fixture fails where any was tried.
"""

import os
import random

import dmalane
import numpy as np
import pytest
from package.models import write_model
from package.torch_on_fake import OnFake, of_numpy


@pytest.fixture(params=["small PyTorch", "PyTorch"])
def gpu(request, driver, monkeypatch):
    if request.param == "PyTorch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    else:
        torch = of_numpy()
    return OnFake(torch, driver, monkeypatch)


def raw(tensor):
    """The bytes of a tensor, wherever it lies."""
    if isinstance(tensor, dmalane.Tensor):
        return tensor.tobytes()
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    torch = __import__("torch")
    return b"" if tensor.numel() == 0 else bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.fixture
def shards(tmp_path):
    """A model of five files, with tensors of many sizes: their paths, and the bytes of each tensor."""
    chance, paths, all_of_them = random.Random(5), [], {}
    for n in range(5):
        tensors = {f"layer.{n}.norm.{i}": ("F32", [8], chance.randbytes(32)) for i in range(40)}
        tensors |= {f"layer.{n}.w.{i}": ("BF16", [512, 300], os.urandom(307200)) for i in range(6)}
        tensors[f"layer.{n}.odd"] = ("U8", [33], chance.randbytes(33))
        tensors[f"layer.{n}.big"] = ("F32", [1000, 500], os.urandom(2000000))
        paths.append(write_model(tmp_path / f"{n}.safetensors", tensors))
        all_of_them |= {name: data for name, (_, _, data) in tensors.items()}
    return paths, all_of_them


def test_every_type_arrives(gpu, model):
    path, tensors = model
    ours = dmalane.load_file(path, "pt", "cuda:0")
    with dmalane.safe_open(path, framework="pt", device=0) as f:
        for name, (dtype, shape, data) in tensors.items():
            one = f.get_tensor(name)
            assert raw(ours[name]) == raw(one) == data, name
            assert dtype.startswith(("F4", "F6")) or list(one.shape) == shape
        streamed = {name: raw(tensor) for name, tensor in f.tensors()}
        assert streamed == {name: data for name, (_, _, data) in tensors.items()}
    assert set(ours) == set(tensors)


def ways(paths):
    """Each way to have a model on a GPU: a function of its tensors' names that returns them."""

    def drop_in(names):
        import dmalane.torch as ours

        return {name: tensor for path in paths for name, tensor in ours.load_file(path, "cuda").items()}

    def opened(read):
        def run(names):
            with dmalane.safe_open(paths, framework="pt", device="cuda") as f:
                return read(f, names)

        return run

    def plan(f, names):
        with f.prefetch(dict.fromkeys(names)) as prefetched:
            return {name: prefetched.take(name) for name in reversed(names)}

    def moved(f, names):
        with f.prefetch() as prefetched:
            return dict(prefetched)

    return {
        "load_file": lambda names: dmalane.load_file(paths, "pt", "cuda:0"),
        "drop-in load_file": drop_in,
        "get_tensor": opened(lambda f, names: {name: f.get_tensor(name) for name in names}),
        "get_tensors": opened(lambda f, names: f.get_tensors()),
        "tensors": opened(lambda f, names: dict(f.tensors(names))),
        "get_slice": opened(lambda f, names: {name: f.get_slice(name)[:] for name in names}),
        "prefetch": opened(moved),
        "prefetch of a plan": opened(plan),
    }


@pytest.mark.parametrize("way", ways([]))
def test_nothing_is_copied_from_memory_that_is_not_registered(gpu, shards, way):
    paths, tensors = shards
    before = gpu.calls("cuMemHostRegister_v2")
    ours = ways(paths)[way](list(tensors))
    assert {name: raw(tensor) for name, tensor in ours.items()} == tensors
    assert gpu.copied() == sum(map(len, tensors.values())), "each byte went over once"
    opened = len(paths) if way == "drop-in load_file" else 1
    # One is a page by which the driver is asked whether it registers memory.
    assert gpu.calls("cuMemHostRegister_v2") - before <= opened * 4
    assert gpu.calls("cuMemHostUnregister") == gpu.calls("cuMemHostRegister_v2") - before - (before > 1)
    if way in ("load_file", "get_tensors", "tensors", "prefetch"):
        assert len(gpu.adopted) == 1 and gpu.waits == 1, "one allocation, and one wait for PyTorch's stream"


def test_memory_is_allocated_in_parts_of_a_bounded_size(gpu, shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.setattr("dmalane._onto.OnGpu.tensors.__defaults__", (3 << 20,))
    with dmalane.safe_open(paths, framework="pt", device="cuda") as f:
        assert {name: raw(tensor) for name, tensor in f.tensors()} == tensors
    sizes = [tensor.numel() for tensor in gpu.adopted]
    assert len(sizes) > 5 and max(sizes) <= 3 << 20


def test_slices_are_those_of_the_whole(gpu, tmp_path):
    chance = random.Random(7)
    shapes = [[7], [5, 3], [40, 2000], [3, 70000], [2, 5, 4], [30, 9, 100], []]
    arrays = {f"t{n}": np.frombuffer(os.urandom(4 * int(np.prod(shape))), "<i4").reshape(shape)
              for n, shape in enumerate(shapes)}  # fmt: skip
    path = write_model(tmp_path / "m.safetensors", {n: ("I32", list(a.shape), a.tobytes()) for n, a in arrays.items()})
    with dmalane.safe_open(path, framework="pt", device="cuda:0") as f:
        for _ in range(150):
            name, array = chance.choice(list(arrays.items()))
            index = []
            for dim in array.shape[: chance.randint(0, array.ndim)]:
                start, stop = sorted((chance.randint(0, dim), chance.randint(0, dim)))
                index.append(chance.choice([slice(start, stop), slice(None), chance.randrange(dim)]))
            found = f.get_slice(name)[tuple(index)]
            assert (raw(found), tuple(found.shape)) == (array[tuple(index)].tobytes(), array[tuple(index)].shape), index
        plan = {"t1": slice(1, 4), "t2": None, "t3": slice(2, None)}
        with f.prefetch(plan) as prefetched:
            for name, part in plan.items():
                assert raw(prefetched.take(name)) == arrays[name][part or slice(None)].tobytes()


def test_memory_that_exists_is_read_into(gpu, shards):
    paths, tensors = shards
    targets = {}
    for name, data in tensors.items():
        dtype = gpu.torch.uint8 if name.endswith("odd") else gpu.torch.bfloat16 if ".w." in name else gpu.torch.float32
        shape = {"odd": [33], "big": [1000, 500]}.get(name.split(".")[-1], [8] if "norm" in name else [512, 300])
        targets[name] = gpu.torch.empty(shape, dtype=dtype, device="cuda:0")
    allocated = len(gpu.adopted)

    class OnGpu(gpu.torch.Tensor):
        device = gpu.torch.device("cuda", 0)

    kinds = {name: np.ndarray.view(tensor, OnGpu) if isinstance(tensor, np.ndarray) else tensor.as_subclass(OnGpu)
             for name, tensor in targets.items()}  # fmt: skip
    dmalane.load_into(kinds, paths)
    assert {name: raw(tensor) for name, tensor in targets.items()} == tensors
    assert len(gpu.adopted) == allocated and gpu.copied() == sum(map(len, tensors.values()))


def test_damage_is_found_and_the_device_goes_on(gpu, shards):
    paths, tensors = shards
    manifest = dmalane.manifest(paths)
    assert len(dmalane.load_file(paths, "pt", "cuda", verify=manifest)) == len(tensors)
    with open(paths[2], "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")
    with dmalane.safe_open(paths, framework="pt", device="cuda", verify=manifest) as f:
        with pytest.raises(dmalane.IntegrityError) as error:
            f.get_tensors()
        assert error.value.tensor == "layer.2.big"
        assert raw(f.get_tensor("layer.1.big")) == tensors["layer.1.big"]


def test_what_cannot_be_read_is_said(gpu, shards, tmp_path):
    paths, tensors = shards
    with dmalane.safe_open(paths, framework="pt", device="cuda") as f:
        for wrong in (lambda: f.get_tensor("layer.1.bog"), lambda: f.tensors(["layer.1.bog"]),
                      lambda: f.get_slice("layer.1.bog")):  # fmt: skip
            with pytest.raises(dmalane.UnknownTensorError, match="layer.1.bog"):
                wrong()
        stream = f.tensors()
        next(stream)
        f.close()
        with pytest.raises(dmalane.ClosedError):
            f.get_tensor("layer.1.big")
    with dmalane.safe_open(paths[0], framework="pt", device="cuda") as f:
        gpu.driver.control("fail cuMemcpyHtoDAsync_v2 1 700")
        with pytest.raises(dmalane.Error, match="layer.0"):
            f.get_tensor("layer.0.big")


def test_a_gpu_that_cannot_be_opened_is_said(gpu, shards):
    gpu.driver.control("virtual-memory 0")
    with pytest.warns(RuntimeWarning, match="not registered.*virtual memory"):
        with pytest.raises(Exception, match=".*"):
            dmalane.load_file(shards[0][0], "pt", "cuda")["no"]
    gpu.driver.control("virtual-memory 1")
