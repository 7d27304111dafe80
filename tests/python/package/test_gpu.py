"""Tensors of PyTorch on a GPU: equal to the files', and copied from memory that is registered once.

The driver in software refuses copies from memory that is not registered, and the fixture fails where any was tried.
"""

import gc
import json
import os
import random
import subprocess
import threading
import time
from contextlib import contextmanager

import dmalane
import numpy as np
import pytest
from dmalane._frameworks import torch_type
from dmalane._load import rounds
from dmalane._onto import BATCH, Gpu, Pinned
from dmalane.plan import Only, Shard
from package.models import sparse_shards, write_model
from package.torch_on_fake import OnFake, OnOther, of_numpy


# The staging buffers, of which sources with latency have more than three, and a page by which the driver is asked
# whether it registers memory.
REGISTERED = 9 + 1


@pytest.fixture(params=["small PyTorch", "PyTorch"])
def gpu(request, driver, monkeypatch):
    if request.param == "PyTorch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    else:
        torch = of_numpy()
    monkeypatch.setattr(Gpu, "_refused", set())
    yield OnFake(torch, driver, monkeypatch)
    Gpu.let_go()


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


@contextmanager
def alone(gpu, store):
    """The module of plans in a group of one rank; skips where there are no groups."""
    distributed = pytest.importorskip("torch.distributed", reason="PyTorch is not installed")
    if isinstance(gpu.torch.empty(1, dtype=gpu.torch.uint8), np.ndarray):
        pytest.skip("the small PyTorch has no groups")
    from dmalane import plan

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    # Its own tensors are the group's, which has host memory here.
    tensor = gpu.torch.tensor
    gpu.torch.tensor = lambda data, device=None, **options: tensor(data, **options)
    try:
        yield plan
    finally:
        gpu.torch.tensor = tensor
        distributed.destroy_process_group()


@pytest.mark.parametrize("way", ways([]))
def test_nothing_is_copied_from_memory_that_is_not_registered(gpu, shards, way):
    paths, tensors = shards
    before = gpu.calls("cuMemHostRegister_v2")
    ours = ways(paths)[way](list(tensors))
    assert {name: raw(tensor) for name, tensor in ours.items()} == tensors
    assert gpu.copied() == sum(map(len, tensors.values())), "each byte went over once"
    assert gpu.counts()["bytes from memory that is not registered"] == 0
    # However many files are opened one after the other: the GPU stays open for a while.
    assert gpu.calls("cuMemHostRegister_v2") - before <= REGISTERED
    Gpu.let_go()
    assert gpu.calls("cuMemHostUnregister") == gpu.calls("cuMemHostRegister_v2") - before - (before > 1)
    if way in ("load_file", "get_tensors", "tensors", "prefetch"):
        assert gpu.waits == 1, "one wait for PyTorch's stream"
    # And one to ask whether the driver lends such memory.
    assert len(gpu.adopted) == len(tensors) + 1, "each tensor has memory of its own"


@pytest.mark.parametrize("way", [*ways([]), "load_into", "plan="])
def test_what_is_done_does_not_grow_with_the_bytes_or_the_tensors(gpu, tmp_path, monkeypatch, way):
    """Of 64 MiB in 100 tensors and of 1 GiB in 2000, in 10 000 by scripts/nightly. The driver keeps no contents, so the
    size costs no memory.

    PyTorch allocates each tensor. Its stream is waited for once for each batch of tensors, of 256 MiB: what was there
    before may still be in use. Who asks for tensors one by one has one wait for each.
    """
    monkeypatch.setattr("dmalane._onto._IDLE", 600.0)
    gpu.driver.control("idle 1")
    gpu.driver.control("delay 0")
    # Opens the GPU.
    dmalane.load_file(sparse_shards(tmp_path, 1 << 20, 5), "pt", "cuda")
    many = 10_000 if os.environ.get("DMALANE_LONG") else 2_000
    for size, count in ((64 << 20, 100), (1 << 30, 100 if way in ("get_tensor", "get_slice") else many)):
        paths = sparse_shards(tmp_path, size, count)
        names = [f"layer.{shard}.{n}" for shard in range(5) for n in range(count // 5)]
        there = {}
        if way == "load_into":
            there = {name: gpu.torch.empty([size // count], dtype=gpu.torch.uint8, device="cuda:0") for name in names}
        before = gpu.counts()
        if way == "load_into":
            dmalane.load_into(as_of_gpu(gpu, there), paths)
        elif way == "plan=":
            with alone(gpu, tmp_path / f"store-{size}") as plan:
                assert len(dict(plan.tensors(paths, {}, device="cuda:0"))) == count
        else:
            assert len(ways(paths)[way](names)) == count
        done = {name: n - before[name] for name, n in gpu.counts().items()}
        batches = -(-size // BATCH)
        waits = {"drop-in load_file": len(paths), "get_tensor": count, "get_slice": count, "load_into": 1}
        # Staging buffers, made where reads need them.
        assert done.pop("registrations") <= REGISTERED
        assert done.pop("allocations") <= REGISTERED
        assert done == {
            "synchronisations": 0,
            "bytes from memory that is not registered": 0,
            "bytes that were copied": size // count * count,
            "tensors that PyTorch allocated": 0 if way == "load_into" else batches if way == "plan=" else count,
            "waits for PyTorch's stream": waits.get(way, batches),
        }


def test_loads_onto_a_device_register_once(gpu, shards):
    """As `dmalane load -d cuda:0`, which is the same below."""
    paths, tensors = shards
    for files in (paths[:1], paths):
        before, copied = gpu.calls("cuMemHostRegister_v2"), gpu.copied()
        loaded = dmalane.load_file(files, device=f"cuda:0,lib={gpu.driver.path}")
        assert all(tensor.tobytes() == tensors[name] for name, tensor in loaded.items())
        assert len(loaded) == len(tensors) * len(files) // 5
        assert gpu.copied() - copied < 1.01 * sum(map(len, tensors.values())) * len(files) / 5 + (1 << 20)
        assert gpu.calls("cuMemHostRegister_v2") - before <= REGISTERED + 1, "and the buffer that reads back"
        del loaded


def test_no_more_is_read_together_than_a_bound(gpu, shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.setattr("dmalane._onto.BATCH", 3 << 20)
    with dmalane.safe_open(paths, framework="pt", device="cuda") as f:
        assert {name: raw(tensor) for name, tensor in f.tensors()} == tensors
    assert gpu.waits > 5


def test_threads_that_read_ahead_are_as_many_as_are_asked_for(gpu, shards):
    paths, tensors = shards
    for threads in (1, 2):
        with dmalane.safe_open(paths, framework="pt", device="cuda", direct=True) as f:
            plan = {name: slice(5) if name.endswith("big") else None for name in tensors}
            with f.prefetch(plan, threads=threads) as ahead:
                assert {name: raw(tensor) == tensors[name] for name, tensor in ahead} == {
                    name: part is None for name, part in plan.items()
                }
            report = f.report()
        (reads,) = (stage["in_flight"] for stage in report["stages"] if stage["stage"] == "read")
        assert report["workers"] == threads and 1 <= reads <= threads


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
        plan = {"t1": slice(1, 4), "t2": None, "t3": slice(2, None), "t4": (slice(None), slice(1, 3)),
                "t5": (slice(3, 20), slice(2, 8), slice(10, 90)), "t6": None}  # fmt: skip
        with f.prefetch(plan) as prefetched:
            for name, part in plan.items():
                whole = arrays[name]
                assert raw(prefetched.take(name)) == (whole if part is None else whole[part]).tobytes()


def as_of_gpu(gpu, tensors, kind="cuda"):
    """The same memory, as tensors that say which device has it."""

    class OnGpu(gpu.torch.Tensor):
        device = gpu.torch.device(kind, 0)

    if hasattr(gpu.torch, "_C"):
        # What is made of them is not of this class, and functions are called once.
        OnGpu.__torch_function__ = gpu.torch._C._disabled_torch_function_impl
    return {name: np.ndarray.view(tensor, OnGpu) if isinstance(tensor, np.ndarray) else tensor.as_subclass(OnGpu)
            for name, tensor in tensors.items()}  # fmt: skip


def test_memory_that_exists_is_read_into(gpu, shards):
    paths, tensors = shards
    targets = {}
    for name, data in tensors.items():
        dtype = gpu.torch.uint8 if name.endswith("odd") else gpu.torch.bfloat16 if ".w." in name else gpu.torch.float32
        shape = {"odd": [33], "big": [1000, 500]}.get(name.split(".")[-1], [8] if "norm" in name else [512, 300])
        targets[name] = gpu.torch.empty(shape, dtype=dtype, device="cuda:0")
    allocated = len(gpu.adopted) + 1

    kinds = as_of_gpu(gpu, targets)
    versions = [getattr(tensor, "_version", None) for tensor in targets.values()]
    dmalane.load_into(kinds, paths)
    changed = [getattr(tensor, "_version", None) for tensor in targets.values()]
    assert all(after is None or after > before for before, after in zip(versions, changed))
    assert dmalane.last_report()["bytes"] >= gpu.copied()
    assert {name: raw(tensor) for name, tensor in targets.items()} == tensors
    assert len(gpu.adopted) == allocated and gpu.copied() == sum(map(len, tensors.values()))


def test_of_targets_that_share_memory_the_last_one_stays(gpu, tmp_path):
    chance = random.Random(11)
    bytes_of = {name: chance.randbytes(4096) for name in ("a", "b", "c", "d")}
    path = write_model(tmp_path / "m.safetensors", {name: ("U8", [4096], data) for name, data in bytes_of.items()})
    memory = gpu.torch.empty([10240], dtype=gpu.torch.uint8, device="cuda:0")
    # Each of b and c begins in the middle of the one in front of it; d is apart.
    targets = {name: memory[at : at + 4096] for name, at in {"a": 0, "b": 2048, "c": 4096}.items()}
    targets["d"] = gpu.torch.empty([4096], dtype=gpu.torch.uint8, device="cuda:0")
    assert [list(together) for together in rounds(targets)] == [["a"], ["b"], ["c", "d"]]
    dmalane.load_into(as_of_gpu(gpu, targets), path)
    assert raw(memory)[:8192] == bytes_of["a"][:2048] + bytes_of["b"][:2048] + bytes_of["c"]
    assert raw(targets["d"]) == bytes_of["d"]


def matrices(folder):
    """A model of three matrices: its path, and the bytes of each."""
    chance = random.Random(3)
    kinds = {"a": "F32", "b": "F8_E4M3", "c": "BF16"}
    tensors = {name: (kind, [40, 30], chance.randbytes(1200 * {"F32": 4, "F8_E4M3": 1, "BF16": 2}[kind]))
               for name, kind in kinds.items()}  # fmt: skip
    return write_model(folder / "m.safetensors", tensors), {name: data for name, (_, _, data) in tensors.items()}


def transposed(torch, name, device):
    """A matrix of `matrices` whose columns follow each other in memory."""
    dtype = {"a": torch.float32, "b": torch.float8_e4m3fn, "c": torch.bfloat16}[name]
    whole = torch.empty([30, 40], dtype=dtype, device=device)
    return whole.T if isinstance(whole, np.ndarray) else whole.t()


@pytest.mark.parametrize("verified", [False, True])
def test_what_cannot_be_read_into_at_once_goes_through_memory_of_the_gpu(gpu, tmp_path, verified):
    path, tensors = matrices(tmp_path)
    targets = {name: transposed(gpu.torch, name, "cuda:0") for name in tensors}
    plain = gpu.torch.empty([40, 30], dtype=gpu.torch.float32, device="cuda:0")
    manifest = dmalane.manifest(path) if verified else None
    for there in (targets, {**targets, "a": plain}):
        copied = gpu.copied()
        dmalane.load_into(as_of_gpu(gpu, there), path, verify=manifest)
        assert {name: raw(tensor) for name, tensor in there.items()} == tensors
        assert gpu.counts()["bytes from memory that is not registered"] == 0
        assert gpu.copied() - copied == sum(map(len, tensors.values()))
    if verified:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([tensors["c"][-1] ^ 1]))
        targets["c"][...] = 0
        with pytest.raises(dmalane.IntegrityError) as error:
            dmalane.load_into(as_of_gpu(gpu, targets), path, verify=manifest)
        assert error.value.tensor == "c" and not any(raw(targets["c"])), "nothing is written that differs"


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


def test_a_gpu_that_cannot_be_used_is_said_once(gpu, shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.setattr(gpu.torch.Tensor, "to", lambda tensor, device: tensor)
    monkeypatch.setattr(gpu.torch, "accelerator", None, raising=False)
    gpu.driver.control("virtual-memory 0")
    with pytest.warns(RuntimeWarning, match="PyTorch copies.*virtual memory") as said:
        for _ in range(2):
            loaded = dmalane.load_file(paths, "pt", "cuda")
            assert {name: raw(tensor) for name, tensor in loaded.items()} == tensors
    assert len(said) == 1
    gpu.driver.control("virtual-memory 1")


def test_memory_that_the_driver_does_not_lend_is_said(gpu, shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.setattr(gpu.torch.Tensor, "to", lambda tensor, device: tensor)
    monkeypatch.setattr(gpu.torch, "accelerator", None, raising=False)
    # As an allocator that was plugged into PyTorch, and has managed memory.
    monkeypatch.setattr(gpu, "adopt", lambda tensor: tensor)
    with pytest.warns(RuntimeWarning, match="PyTorch copies"):
        loaded = dmalane.load_file(paths, "pt", "cuda")
    assert {name: raw(tensor) for name, tensor in loaded.items()} == tensors


def test_a_gpu_that_nobody_uses_is_closed(gpu, shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.setattr("dmalane._onto._IDLE", 4.0)
    # Not the one of another test, which may wait for longer.
    monkeypatch.setattr(Gpu, "_timer", None)
    assert raw(dmalane.load_file(paths, "pt", "cuda")["layer.0.big"]) == tensors["layer.0.big"]
    opened = gpu.calls("cuDevicePrimaryCtxRetain")
    assert raw(dmalane.load_file(paths, "pt", "cuda")["layer.1.big"]) == tensors["layer.1.big"]
    assert gpu.calls("cuDevicePrimaryCtxRetain") == opened, "it was open"
    until = time.monotonic() + 30
    while Gpu._open:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert raw(dmalane.load_file(paths, "pt", "cuda")["layer.2.big"]) == tensors["layer.2.big"]
    assert gpu.calls("cuDevicePrimaryCtxRetain") > opened


def test_a_header_takes_no_gpu(gpu, shards):
    paths, tensors = shards
    with dmalane.safe_open(paths, framework="pt", device="cuda") as f:
        assert set(f.keys()) == set(tensors) and f.get_tensor_meta("layer.0.big").shape == [1000, 500]
        assert not gpu.adopted and gpu.calls("cuMemHostRegister_v2") <= 1


def test_memory_is_noted_for_the_stream_that_uses_it(gpu, shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.setattr("dmalane._onto.BATCH", 3 << 20)
    with dmalane.safe_open(paths, framework="pt", device="cuda") as f:
        read = dict(f.tensors())
        assert not gpu.recorded, "all work is on the stream that it was allocated on"
        stream = f.tensors()
        first = gpu.stream
        gpu.stream = type(first)(synchronize=gpu.wait, number=2)
        read = dict(stream)
    noted = {at for at, on in gpu.recorded if on is gpu.stream}
    assert noted and noted <= {tensor.data_ptr() for tensor in read.values()}
    # The first batch was allocated before the stream changed.
    assert read["layer.0.big"].data_ptr() in noted or read["layer.0.norm.0"].data_ptr() in noted


def test_where_memory_lacks_nothing_is_read_ahead(gpu, shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.setattr("dmalane._onto.BATCH", 1 << 20)
    with dmalane.safe_open(paths, framework="pt", device="cuda") as f:
        f.get_tensor("layer.0.big")
        stream = f.tensors()
        name, tensor = next(stream)
        read = {name: raw(tensor)}
        # Each of these is asked for again when what came before it was handed out.
        gpu.failing |= {len(gpu.adopted) + n for n in (0, 70, 140, 210)}
        read |= {name: raw(tensor) for name, tensor in stream}
        assert read == tensors and len(gpu.failing) < 4
        gpu.failing = set(range(len(gpu.adopted), len(gpu.adopted) + 1000))
        with pytest.raises(gpu.torch.OutOfMemoryError):
            dict(f.tensors())
        gpu.failing = set()
        assert raw(f.get_tensor("layer.1.big")) == tensors["layer.1.big"]


def test_what_is_closed_before_it_begins_ends(gpu, shards, monkeypatch):
    paths, tensors = shards
    monkeypatch.setattr("dmalane._onto.BATCH", 1 << 20)
    with dmalane.safe_open(paths, framework="pt", device="cuda") as f:
        gpu.driver.control("delay 2000")
        for _ in range(3):
            f.prefetch().close()
            f.tensors().close()
            del_at_once = f.tensors()
            del del_at_once
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith("dmalane_") for name in names), names
        gpu.driver.control("delay 0")
        copied = gpu.copied()
        assert copied < 9 * sum(map(len, tensors.values()))
        assert raw(f.get_tensor("layer.1.big")) == tensors["layer.1.big"]


def test_the_limit_counts_the_memory_that_is_registered(gpu, shards):
    paths, tensors = shards
    with dmalane.safe_open(paths, framework="pt", device="cuda", memory_limit="40MiB") as f:
        with pytest.raises(dmalane.MemoryLimitError, match=str(48 << 20)):
            f.get_tensor("layer.1.big")
    with dmalane.safe_open(paths, framework="pt", device="cuda", memory_limit="48MiB") as f:
        assert {name: raw(tensor) for name, tensor in f.tensors()} == tensors
        assert f.report()["memory_used"] == 0


def test_graphs_that_others_capture_go_on(gpu, shards):
    paths, tensors = shards
    gpu.driver.control("capture 1")
    loaded = dmalane.load_file(paths, "pt", "cuda")
    Gpu.let_go()
    gpu.driver.control("capture 0")
    assert {name: raw(tensor) for name, tensor in loaded.items()} == tensors


def test_slices_are_not_compared(gpu, shards):
    paths, _ = shards
    manifest = dmalane.manifest(paths)
    with dmalane.safe_open(paths, framework="pt", device="cuda", verify=manifest) as f:
        for index in (np.s_[:], np.s_[:0], np.s_[:, :100], np.s_[3:900]):
            with pytest.raises(ValueError, match="compared"):
                f.get_slice("layer.1.big")[index]


def test_wide_slices_are_cut_in_pieces(gpu, tmp_path, monkeypatch):
    array = np.frombuffer(os.urandom(4 * 700 * 30 * 9), "<i4").reshape(700, 30, 9)
    path = write_model(tmp_path / "m.safetensors", {"t": ("I32", [700, 30, 9], array.tobytes())})
    monkeypatch.setattr("dmalane._onto._CUT", 50_000)
    with dmalane.safe_open(path, framework="pt", device="cuda") as f:
        for index in (np.s_[3:650, 2:20, 1:5], np.s_[:, 5], np.s_[:, :, 8], np.s_[20:30, :, 2:]):
            assert raw(f.get_slice("t")[index]) == array[index].tobytes()
        assert max(tensor.nbytes for tensor in gpu.adopted) <= max(50_000, array.nbytes)


def test_a_plan_reads_onto_the_gpu(gpu, shards, tmp_path, monkeypatch):
    paths, tensors = shards
    rules = {"*.big": Shard(0), "*.w.*": Only(0)}
    with alone(gpu, tmp_path / "store") as plan:
        read = dict(plan.tensors(paths, rules, device="cuda:0"))
        assert {name: raw(tensor) for name, tensor in read.items()} == tensors
        assert gpu.copied() >= sum(map(len, tensors.values()))
        # A rank that cannot allocate says so to the others first.
        gpu.failing = set(range(len(gpu.adopted), len(gpu.adopted) + 1000))
        with pytest.raises(gpu.torch.OutOfMemoryError):
            dict(plan.tensors(paths, rules, device="cuda:0"))
        monkeypatch.setattr(Gpu, "of", lambda device: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            dict(plan.tensors(paths, rules, device="cuda:0"))


def kept(program):
    listed = subprocess.run([program, "kept", "--json"], capture_output=True, check=True)
    return [(model["name"], "device" in model, model["attached"]) for model in json.loads(listed.stdout)["models"]]


def test_what_is_kept_on_a_gpu_is_attached_to_as_it_lies(gpu, model, keeper):
    path, tensors = model
    program = gpu.driver.path.with_name("dmalane")
    manifest = dmalane.manifest(path)
    loaded = dmalane.load_file(path, "pt", "cuda:0", keep=True, verify=manifest)
    assert kept(program) == [("every", True, True)]
    copied = gpu.copied()
    progress = []
    again = dmalane.load_file(path, "pt", 0, keep=True, progress=lambda done, total: progress.append((done, total)))
    assert dmalane.last_report()["bytes"] == sum(tensor.nbytes for tensor in again.values())
    assert progress == [(sum(len(data) for _, _, data in tensors.values()),) * 2]
    on_device = dmalane.load_file(path, device=f"cuda:0,lib={gpu.driver.path}", keep=True)
    named = dmalane.attach("every", "pt", gpu.torch.device("cuda"), verify=True)
    for name, (dtype, shape, data) in tensors.items():
        for one in (loaded, again, named):
            taken = one[name].tobytes() if isinstance(one[name], dmalane.DeviceTensor) else raw(one[name])
            assert taken == data, name
            assert dtype.startswith(("F4", "F6")) or list(one[name].shape) == shape
            assert isinstance(one[name], dmalane.DeviceTensor) == (torch_type(dtype, shape) is None), name
        assert on_device[name].tobytes() == data
    assert gpu.copied() == copied, "nothing is copied onto the GPU"
    # The memory is lent as long as any tensor over it.
    name, one = next((name, tensor) for name, tensor in loaded.items() if tensor.nbytes > 8)
    part = one.view(-1)[1:]
    del loaded, again, named, on_device, one
    gc.collect()
    assert kept(program) == [("every", True, True)] and raw(part) in tensors[name][2]
    del part
    gc.collect()
    assert kept(program) == [("every", True, False)]
    # A file that has changed is read again; what has other hashes is refused.
    write_model(path, {"other": ("U8", [3], b"abc")})
    assert raw(dmalane.load_file(path, "pt", "cuda", keep=True)["other"]) == b"abc"
    manifest["files"][0]["regions"][0]["xxh3"] = "0" * 16
    with pytest.raises(dmalane.IntegrityError):
        dmalane.load_file(path, "pt", "cuda", keep=True, verify=manifest)
    # A limit of host memory is for a model that is kept there.
    assert raw(dmalane.load_file(path, "pt", "cuda", keep=True, memory_limit=1 << 30)["other"]) == b"abc"
    assert sorted(on_gpu for _, on_gpu, _ in kept(program)) == [False, True]


def test_a_gpu_that_has_no_copy_gets_that_of_the_host(gpu, model, keeper):
    path, tensors = model
    dmalane.load_file(path, keep=True)
    ours = dmalane.attach("every", "pt", "cuda:0", verify=True)
    assert {name: raw(tensor) for name, tensor in ours.items()} == {name: t[2] for name, t in tensors.items()}
    assert gpu.copied() and len(kept(gpu.driver.path.with_name("dmalane"))) == 1


@pytest.fixture(params=[(torch, kind) for torch in ("small PyTorch", "PyTorch") for kind in ("xpu", "cuda")])
def other(request, monkeypatch):
    """XPU, and ROCm, which PyTorch calls "cuda"."""
    if request.param[0] == "PyTorch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    else:
        torch = of_numpy()
    monkeypatch.setattr(Pinned, "_open", {})
    monkeypatch.setattr("dmalane._onto._PINNED", 1 << 20)
    return OnOther(torch, monkeypatch, request.param[1])


def test_other_devices_get_bytes_from_memory_that_is_pinned_once(other, shards):
    paths, tensors = shards
    with dmalane.safe_open(paths, framework="pt", device=other.kind) as f:
        for read in (f.get_tensors(), {name: f.get_tensor(name) for name in f}, dict(f.prefetch())):
            assert {name: raw(tensor) for name, tensor in read.items()} == tensors
        assert raw(f.get_slice("layer.1.big")[3:7]) == tensors["layer.1.big"][6000:14000]
    loaded = dmalane.load_file(paths, "pt", f"{other.kind}:0")
    assert {name: raw(tensor) for name, tensor in loaded.items()} == tensors
    # Of each device two buffers, and no byte from elsewhere.
    assert len(other.pinned) == 4 and other.bytes == {True: 4 * sum(map(len, tensors.values())) + 8000, False: 0}


def test_memory_of_other_devices_is_filled_from_pinned_memory(other, tmp_path):
    path, tensors = matrices(tmp_path)
    targets = {name: transposed(other.torch, name, other.kind) for name in tensors}
    targets["a"] = other.torch.empty([40, 30], dtype=other.torch.float32, device=other.kind)
    for manifest in (None, dmalane.manifest(path)):
        dmalane.load_into(as_of_gpu(other, targets, other.kind), path, verify=manifest)
        assert {name: raw(tensor) for name, tensor in targets.items()} == tensors
    assert len(other.pinned) == 2 and other.bytes == {True: 2 * sum(map(len, tensors.values())), False: 0}


def test_a_device_that_pins_nothing_is_said_once(other, shards, monkeypatch):
    paths, tensors = shards
    empty = other.torch.empty

    def refuses(shape, *, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("no pinned memory here")
        return empty(shape, **options)

    monkeypatch.setattr(other.torch, "empty", refuses)
    with pytest.warns(RuntimeWarning, match=f"{other.kind}.*not pinned.*no pinned memory here") as said:
        for _ in range(2):
            loaded = dmalane.load_file(paths, "pt", other.kind)
    assert {name: raw(tensor) for name, tensor in loaded.items()} == tensors and len(said) == 1
