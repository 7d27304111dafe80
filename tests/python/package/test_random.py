"""Random slices and lifetimes: what is lent is right as long as it lives, and is freed when it dies.

DMALANE_FUZZ_SECONDS says how long, 2 by default; DMALANE_FUZZ_SEED where it begins.
"""

import gc
import os
import random
import sys
import threading
import time
import weakref

import pytest
from package.models import random_tensors, write_model

np = pytest.importorskip("numpy")
dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")

SECONDS = float(os.environ.get("DMALANE_FUZZ_SECONDS", 2))
SEED = int(os.environ.get("DMALANE_FUZZ_SEED", 1))
TYPES = {"U8": "u1", "I16": "<i2", "F32": "<f4", "F64": "<f8"}


class Run:
    """One sequence of random steps. `live` holds views of lent memory with the bytes that they must show."""

    def __init__(self, folder, seed):
        self.chance = random.Random(seed)
        self.tensors = random_tensors(seed)
        self.limit = 32 << 20
        for n in range(self.chance.randint(1, 8)):
            dtype = self.chance.choice(list(TYPES))
            dims, size = self.chance.randint(1, 3), self.limit
            # Several have to fit the limit.
            while size > 1 << 20:
                shape = [self.chance.choice([0, 1, 2, 5, 33, 257]) for _ in range(dims)]
                size = int(np.prod(shape)) * np.dtype(TYPES[dtype]).itemsize
            self.tensors[f"n{n}"] = (dtype, shape, self.chance.randbytes(size))
        self.path = write_model(folder / f"{seed}.safetensors", self.tensors, pad=self.chance.choice([8, 3]))
        self.file = self.open()
        self.live, self.streams, self.steps = [], [], 0

    def open(self):
        return dmalane.safe_open(self.path, framework="bytes", memory_limit=self.limit)

    def step(self):
        self.steps += 1
        self.chance.choice(
            [self.get, self.slice, self.view, self.release, self.drop, self.drop, self.stream, self.take, self.check,
             self.load, self.reopen, self.write]
        )()  # fmt: skip

    def get(self):
        name = self.chance.choice(list(self.tensors))
        self.keep(self.file.get_tensor(name), self.tensors[name][2])

    def keep(self, tensor, data):
        self.live.append([tensor, bytearray(data), False])

    def slice(self):
        name = self.chance.choice([n for n, (t, shape, _) in self.tensors.items() if t in TYPES and shape])
        dtype, shape, data = self.tensors[name]
        whole = np.frombuffer(data, TYPES[dtype]).reshape(shape)
        # Some of the first dimensions; behind an ellipsis, of the last ones.
        index, given = [], self.chance.randint(0, len(shape))
        last = self.chance.randint(0, given) if self.chance.random() < 0.3 else None
        for dim in shape[:given] if last is None else shape[: given - last] + shape[len(shape) - last :]:
            if dim and self.chance.random() < 0.3:
                index.append(self.chance.randrange(-dim, dim))
            else:
                ends = [self.chance.choice([None, self.chance.randint(-dim - 2, dim + 2)]) for _ in range(2)]
                index.append(slice(*ends))
        if last is not None:
            index.insert(given - last, Ellipsis)
        want = whole[tuple(index)]
        got = self.file.get_slice(name)[tuple(index)]
        assert tuple(got.shape) == want.shape and got.tobytes() == want.tobytes(), (name, index)
        self.keep(got, want.tobytes())

    def view(self):
        """A view, by the buffer protocol or DLPack, that outlives the tensor."""
        tensors = [item for item in self.live if isinstance(item[0], dmalane.Tensor) and not item[0].released]
        if not tensors:
            return
        item = self.chance.choice(tensors)
        tensor, data, _ = item
        kind = self.chance.randrange(3)
        if kind == 0:
            self.live.append([memoryview(tensor), data, True])
        elif kind == 1 and tensor.nbytes:
            self.live.append([np.frombuffer(tensor, np.uint8), data, True])
        elif tensor.dtype in TYPES:
            self.live.append([np.from_dlpack(tensor), data, True])

    def release(self):
        tensors = [item for item in self.live if isinstance(item[0], dmalane.Tensor)]
        if tensors:
            item = self.chance.choice(tensors)
            try:
                item[0].release()
            except BufferError:
                return
            assert item[0].released
            self.live = [other for other in self.live if other is not item]
            for use in (item[0].tobytes, lambda: memoryview(item[0]), lambda: item[0].address):
                with pytest.raises(dmalane.ClosedError):
                    use()

    def drop(self):
        while self.live and (len(self.live) > 40 or self.chance.random() < 0.7):
            self.live.pop(self.chance.randrange(len(self.live)))

    def stream(self):
        if len(self.streams) < 3:
            self.streams.append(self.file.tensors())
        else:
            self.streams.pop(self.chance.randrange(3))

    def take(self):
        if not self.streams:
            return
        stream = self.chance.choice(self.streams)
        try:
            name, tensor = next(stream)
            self.keep(tensor, self.tensors[name][2])
        except (StopIteration, dmalane.ClosedError):
            self.streams.remove(stream)

    def check(self):
        for view, data, shared in self.live:
            if isinstance(view, dmalane.Tensor) and view.released:
                continue
            got = view.tobytes()
            assert got == bytes(data), (view, shared)

    def load(self):
        align = self.chance.choice([None, 64])
        for name, tensor in dmalane.load_file(self.path, framework="bytes", align=align).items():
            if self.chance.random() < 0.1:
                self.keep(tensor, self.tensors[name][2])

    def reopen(self):
        self.file.close()
        with pytest.raises(dmalane.ClosedError):
            self.file.get_tensor("n0")
        self.file = self.open()

    def write(self):
        """Writes through one view are seen by all others of the same memory, and by nobody else."""
        tensors = [item for item in self.live if isinstance(item[0], dmalane.Tensor) and item[0].nbytes]
        if tensors:
            tensor, data, _ = self.chance.choice(tensors)
            if tensor.released:
                return
            at, byte = self.chance.randrange(tensor.nbytes), self.chance.randrange(256)
            memoryview(tensor)[at] = data[at] = byte

    def end(self):
        self.check()
        self.streams.clear()
        file = self.file
        self.live.clear()
        gc.collect()
        deadline = time.monotonic() + 30
        while file.report()["memory_used"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert file.report()["memory_used"] == 0


def run_for(folder, seconds, seed):
    began, steps = time.monotonic(), 0
    while steps == 0 or time.monotonic() - began < seconds:
        run = Run(folder, seed)
        try:
            for _ in range(300):
                run.step()
            run.end()
        except BaseException:
            print(f"seed {seed}, step {run.steps}: {run.path}")
            raise
        run.path.unlink()
        steps, seed = steps + run.steps, seed + 100
    return steps


def test_random_slices_and_lifetimes(tmp_path):
    print(f"{run_for(tmp_path, SECONDS, SEED)} steps")


def test_the_same_on_threads(tmp_path):
    failed = []

    def worker(n):
        try:
            run_for(tmp_path, SECONDS / 2, SEED + n)
        except BaseException as error:  # noqa: BLE001
            failed.append(error)
            raise

    threads = [threading.Thread(target=worker, args=(n + 1,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed, failed


def test_references_are_counted(model):
    tensor = dmalane.load_file(model[0], framework="bytes")["F32.matrix"]
    count, dead = sys.getrefcount(tensor), weakref.ref(tensor)
    views = [memoryview(tensor), np.frombuffer(tensor, np.uint8)]
    assert sys.getrefcount(tensor) == count + 2
    of_dlpack = np.from_dlpack(tensor)
    assert sys.getrefcount(tensor) == count + 2, "DLPack keeps the memory, not the tensor"
    views.clear()
    assert sys.getrefcount(tensor) == count
    data = tensor.tobytes()
    for _ in range(1000):
        memoryview(tensor).release()
        tensor.__dlpack__()
    assert sys.getrefcount(tensor) == count
    del tensor
    gc.collect()
    assert dead() is None and of_dlpack.tobytes() == data
