"""PyTorch on the CUDA driver in software: the real one, or where it is not installed a small one over NumPy.

Its tensors "on the GPU" lie in host memory that the driver takes for the GPU's: it refuses every copy elsewhere.
"""

import contextlib
import ctypes
import math
import types
import weakref
from bisect import bisect, insort

import ml_dtypes
import numpy as np
from package.capsule import Capsule

NAMES = {
    "bool": "bool", "uint8": "u1", "int8": "i1", "uint16": "<u2", "int16": "<i2", "uint32": "<u4", "int32": "<i4",
    "uint64": "<u8", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "bfloat16": ml_dtypes.bfloat16, "float8_e5m2": ml_dtypes.float8_e5m2, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu, "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


class Tensor(np.ndarray):
    """An array with the methods of a tensor that are called here."""

    device = types.SimpleNamespace(type="cpu")

    def copy_(self, source, non_blocking=False):
        self[...] = source

    def to(self, device):
        return np.array(self).view(Tensor)

    def is_conj(self):
        return False

    is_neg = is_inference = is_conj

    def view(self, *to):
        if len(to) == 1 and isinstance(to[0], np.dtype):
            return super().view(to[0])
        return self.reshape(*to)

    def data_ptr(self):
        return self.ctypes.data

    def is_contiguous(self):
        return self.flags.c_contiguous

    def contiguous(self):
        return np.ascontiguousarray(self).view(Tensor) if self.ndim else self

    def numel(self):
        return self.size


class Device:
    """`torch.device`."""

    def __init__(self, name, index=None):
        if isinstance(name, Device):
            name = str(name)
        if isinstance(name, int):
            name = f"cuda:{name}"
        self.type, _, number = name.partition(":")
        if self.type not in ("cpu", "cuda", "meta", "xpu"):
            raise RuntimeError(f"no device {name}")
        self.index = int(number) if number else index

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __eq__(self, other):
        return str(self) == str(other)

    def __hash__(self):
        return hash(str(self))


def of_numpy():
    """A module as PyTorch is, as far as the package calls it."""
    torch = types.ModuleType("torch")
    for name, kind in NAMES.items():
        setattr(torch, name, np.dtype(kind))
    torch.Tensor, torch.device, torch.no_grad = Tensor, Device, contextlib.nullcontext
    torch.version = types.SimpleNamespace(hip=None)
    torch.empty = lambda shape, *, dtype, pin_memory=False: np.empty(shape, dtype).view(Tensor)
    torch.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
    torch.autograd = types.SimpleNamespace(graph=types.SimpleNamespace(increment_version=lambda tensors: None))
    torch.frombuffer = lambda buffer, *, dtype: np.frombuffer(buffer, dtype).view(Tensor)
    torch.cuda = types.SimpleNamespace()
    return torch


class OnFake:
    """Puts a module of PyTorch on the driver in software, until the test ends."""

    def __init__(self, torch, driver, monkeypatch):
        self.torch, self.driver, self.adopted, self.waits = torch, driver, [], 0
        # Bytes that PyTorch itself copied to the GPU from memory of the host: none of it is registered.
        self.unregistered = 0
        # Where the memory of the GPU begins and ends, in order.
        self.places = []
        # Allocations that fail from now on, by their number.
        self.failing = set()
        monkeypatch.setenv("DMALANE_CUDA_LIB", str(driver.path))
        monkeypatch.setitem(__import__("sys").modules, "torch", torch)
        empty, copy, to = torch.empty, torch.Tensor.copy_, torch.Tensor.to

        def noted(target, source, non_blocking=False):
            if self.has(target) and not self.has(source):
                self.unregistered += source.nbytes
            return copy(target, source)

        def moved(tensor, device):
            if not str(device).startswith("cuda"):
                return to(tensor, device)
            self.unregistered += tensor.nbytes
            return tensor

        monkeypatch.setattr(torch.Tensor, "copy_", noted)
        monkeypatch.setattr(torch.Tensor, "to", moved)

        def on_gpu(shape, *, dtype, device=None, pin_memory=False):
            if device is None or torch.device(device).type == "cpu":
                return empty(shape, dtype=dtype)
            if torch.device(device).type == "meta":
                return empty(shape, dtype=dtype, device=device)
            if len(self.adopted) in self.failing:
                self.failing.remove(len(self.adopted))
                raise torch.OutOfMemoryError("out of memory")
            return self.adopt(empty(shape, dtype=dtype))

        self.stream = types.SimpleNamespace(synchronize=self.wait)
        for name, value in (("init", lambda: None), ("current_device", lambda: 0)):
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream, raising=False)
        monkeypatch.setattr(torch, "empty", on_gpu)
        monkeypatch.setattr(torch, "from_dlpack", self.lent, raising=False)
        self.recorded = []
        note = lambda tensor, stream: self.recorded.append((tensor.data_ptr(), stream))  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "record_stream", note, raising=False)

    def wait(self):
        self.waits += 1

    def adopt(self, tensor):
        """Lets the driver take the memory of a tensor for the GPU's. It stays: addresses are not used again."""
        if tensor.numel():
            nbytes = tensor.numel() * tensor.dtype.itemsize
            self.driver.control(f"adopt {tensor.data_ptr()} {nbytes}")
            self.adopted.append(tensor)
            insort(self.places, (tensor.data_ptr(), tensor.data_ptr() + nbytes))
        return tensor

    def has(self, tensor):
        """Whether its memory is the GPU's."""
        at = bisect(self.places, (tensor.data_ptr(), math.inf))
        return at > 0 and tensor.data_ptr() < self.places[at - 1][1]

    def calls(self, *names):
        return sum(self.driver.control(f"calls {name}") for name in names)

    def counts(self):
        """What has been done so far that takes the same time however many bytes it is for."""
        return {
            "registrations": self.calls("cuMemHostRegister_v2", "cuMemHostAlloc"),
            "allocations": self.calls("cuMemCreate", "cuMemAddressReserve", "cuMemMap"),
            "synchronisations": self.calls("cuCtxSynchronize", "cuStreamSynchronize", "cuStreamWaitEvent"),
            "waits for PyTorch's stream": self.waits,
            "tensors that PyTorch allocated": len(self.adopted),
            "bytes from memory that is not registered": self.driver.control("unregistered") + self.unregistered,
            "bytes that were copied": self.copied(),
        }

    def lent(self, tensor):
        """`torch.from_dlpack`: a copy of what is lent, which is lent as long as that lives. PyTorch ignores the
        flag that says to read alone."""
        assert tensor.__dlpack_device__() == (2, 0)
        capsule = Capsule(tensor.__dlpack__(max_version=(1, 0), stream=1))
        assert (capsule.name, capsule.managed.flags) == (b"dltensor_versioned", 1)
        at, size = capsule.tensor.data, tensor.nbytes
        data = b"".join(self.driver.read(at + n, min(4096, size - n)) for n in range(0, size, 4096))
        memory = (ctypes.c_uint8 * size).from_buffer_copy(data)
        weakref.finalize(memory, capsule.consume())
        return self.torch.frombuffer(memory, dtype=self.torch.uint8)

    def copied(self):
        return self.driver.control("copied")


def in_a_process(path):
    """A GPU of a process of its own, with PyTorch on it; to be called before dmalane has opened a driver.

    What PyTorch makes on the GPU by `full` is small, and the group's, which has host memory here."""
    import pytest
    import torch
    from package.fake_driver import FakeDriver

    driver = FakeDriver(path)
    driver.begin()
    gpu = OnFake(torch, driver, pytest.MonkeyPatch())
    full, tensor = torch.full, torch.tensor
    torch.full = lambda shape, value, device=None, **options: full(shape, value, **options)

    def copied(data, device=None, **options):
        made = tensor(data, **options)
        gpu.unregistered += made.nbytes if str(device).startswith("cuda") else 0
        return made

    torch.tensor = copied
    gpu.begun = gpu.counts()
    return gpu


class OnOther:
    """Puts a module of PyTorch on an accelerator that is none of CUDA's: its memory is the host's, and copies to it are
    counted, by whether they come from memory that was pinned. On ROCm it is called "cuda"."""

    def __init__(self, torch, monkeypatch, kind="xpu"):
        self.torch, self.bytes, self.kind = torch, {True: 0, False: 0}, kind
        self.pinned, self.there = [], []
        monkeypatch.setattr(torch.version, "hip", "7.2" if kind == "cuda" else None)
        monkeypatch.setitem(__import__("sys").modules, "torch", torch)
        empty, copy, to = torch.empty, torch.Tensor.copy_, torch.Tensor.to
        # Where they lie, in order: the first and the end of each.
        there, pinned = [], []

        def on_other(shape, *, dtype, device=None, pin_memory=False):
            tensor = empty(shape, dtype=dtype)
            is_there = device is not None and torch.device(device).type == kind
            if pin_memory or is_there:
                # Kept, so that no other one gets its place.
                (self.pinned if pin_memory else self.there).append(tensor)
                at = tensor.data_ptr()
                insort(pinned if pin_memory else there, (at, at + tensor.nbytes))
            return tensor

        def within(places, tensor):
            at = tensor.data_ptr()
            found = bisect(places, (at, math.inf))
            return found > 0 and at < places[found - 1][1]

        def noted(target, source, non_blocking=False):
            if within(there, target) and not within(there, source):
                self.bytes[within(pinned, source)] += source.nbytes
            return copy(target, source)

        def moved(tensor, device):
            if str(device).startswith(kind):
                self.bytes[False] += tensor.nbytes
                return tensor
            return to(tensor, device)

        monkeypatch.setattr(torch, "empty", on_other)
        monkeypatch.setattr(torch.Tensor, "copy_", noted)
        monkeypatch.setattr(torch.Tensor, "to", moved)
        event = types.SimpleNamespace(synchronize=lambda: None, record=lambda: None)
        monkeypatch.setattr(torch, "Event", lambda device: event, raising=False)
        accelerator = types.SimpleNamespace(current_accelerator=lambda: torch.device(kind))
        monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
