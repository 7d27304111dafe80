"""A program of its own that uses a device through the C interface, and trusts nothing that dmalane says of bytes.

client.py LIBRARY version
client.py LIBRARY load DEVICE FILE [PLACEMENT]     loads a file, copies back what is on the device, and prints the
                                                   length and the SHA-256 of each tensor, by Python, as JSON
client.py LIBRARY witness DEVICE FILE              at each line of its input, it begins or ends to use the device over
                                                   and over; whenever its daemon is lost, it gives back all it has and
                                                   comes again. At each end it prints what it saw, as JSON

Exit status 1, with a reason, where the device or the file fails; 3 where bytes are wrong.
"""

import collections
import ctypes
import errno
import gc
import hashlib
import json
import os
import select
import sys
import time

CHUNK = 1 << 20
SCRATCH = 256 << 10
TO_DEVICE, TO_HOST = 0, 1
BIND, READ, WRITE = 0, 1, 2
# A call on a daemon that is stopped or gone ends before that.
LONGEST = 60


class VmOp(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint32), ("handle", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64) for name in ("offset", "range", "addr")
    ]


class TargetOp(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint32), ("rows", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64)
        for name in ("user", "len", "at", "memory", "offset", "value", "memory_pitch", "pitch")
    ]


class Completion(ctypes.Structure):
    _fields_ = [("user", ctypes.c_uint64), ("bytes", ctypes.c_uint64)] + [
        ("result", ctypes.c_int32), ("zero", ctypes.c_uint32)
    ]


class Tensor(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("va", "len", "name_len")]


class Filled(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("len", ctypes.c_uint64), ("checksum", ctypes.c_uint64)]


class ReadConfig(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("threads", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64) for name in ("offset", "len", "chunk", "limit", "timeout_ms")
    ]


class Failed(Exception):
    """A call that gave an error, with its number."""

    def __init__(self, call, number, text):
        super().__init__(f"{call}: {errno.errorcode.get(number, number)}: {text}")
        self.call, self.number = call, number


class Wrong(Exception):
    """Not the right bytes, or a call that took too long."""


class Library:
    def __init__(self, path):
        self.calls = ctypes.CDLL(path)

    def __getattr__(self, name):
        """The call `dml_` with this name; it raises what went wrong."""
        function = getattr(self.calls, f"dml_{name}")

        def call(*arguments):
            began = time.monotonic()
            result = function(*arguments)
            if time.monotonic() - began > LONGEST:
                raise Wrong(f"{name} took {time.monotonic() - began:.0f} s")
            if result < 0:
                text = ctypes.create_string_buffer(1000)
                self.calls.dml_last_error(text, ctypes.c_size_t(1000))
                raise Failed(name, -result, text.value.decode(errors="replace"))

        return call


class Device:
    """An open device, with host memory of one chunk, and memory of its own to write to."""

    def __init__(self, library, name):
        self.library = library
        # What there is to give back, the last first.
        self.undo = []
        self.target = self.made("target_open", name.encode(), then="target_close")
        try:
            self.memory, self.at = self.host_memory(CHUNK)
        except BaseException:
            self.close()
            raise

    def made(self, call, *arguments, then):
        number = ctypes.c_uint64()
        getattr(self.library, call)(*arguments, ctypes.byref(number))
        self.undo.append((then, number))
        return number

    def host_memory(self, size):
        memory, at = ctypes.c_uint64(), ctypes.c_void_p()
        self.library.memory_create(self.target, ctypes.c_uint64(size), ctypes.byref(memory), ctypes.byref(at))
        self.undo.append(("memory_destroy", memory))
        return memory, at.value

    def file_in_memory(self, path):
        """A file, read by the library, as host memory of the device; gives what is its place."""
        buffer, filled, at = ctypes.c_uint64(), Filled(), ctypes.c_void_p()
        config = ReadConfig(size=ctypes.sizeof(ReadConfig))
        with open(path, "rb") as file:
            self.library.alloc_and_read(file.fileno(), ctypes.byref(config), ctypes.byref(buffer), ctypes.byref(filled))
        # A card of a daemon takes memory of its own heap alone: the buffer then stays one.
        memory = ctypes.c_uint64()
        try:
            self.library.memory_register(self.target, buffer, ctypes.byref(memory), ctypes.byref(at))
            self.undo.append(("memory_destroy", memory))
        except Failed:
            self.undo.append(("buffer_destroy", buffer))
        return filled.data, filled.len

    def device_memory(self, size):
        """Memory of the device, bound; gives its device virtual address."""
        handle, va, reserved = ctypes.c_uint32(), ctypes.c_uint64(), ctypes.c_uint64()
        self.library.target_allocate(self.target, ctypes.c_uint64(size), None, ctypes.byref(handle))
        self.library.target_reserve(
            self.target, handle, ctypes.c_uint64(0), ctypes.byref(va), ctypes.byref(reserved)
        )
        operation = VmOp(BIND << 8 | READ | WRITE, handle.value, 0, size, va.value)
        size = ctypes.c_size_t(ctypes.sizeof(operation))
        self.library.target_bind(self.target, ctypes.byref(operation), size, ctypes.c_size_t(1))
        return va.value

    def copy(self, kind, va, size):
        """Copies between the chunk of host memory and the device."""
        operation = TargetOp(kind=kind, user=7, len=size, at=va, memory=self.memory.value)
        count, done = ctypes.c_size_t(), Completion()
        size_of = ctypes.c_size_t(ctypes.sizeof(operation))
        self.library.target_submit(
            self.target, ctypes.byref(operation), size_of, ctypes.c_size_t(1), ctypes.byref(count)
        )
        self.poll(done)
        if done.result:
            raise Failed("a copy", -done.result, "of the device")
        if (done.user, done.bytes) != (7, size):
            raise Wrong(f"a copy of {size} bytes is reported as {done.bytes}, of {done.user}")

    def poll(self, done):
        count, until = ctypes.c_size_t(), time.monotonic() + LONGEST
        while not count.value:
            if time.monotonic() > until:
                raise Wrong(f"an operation has not ended after {LONGEST} s")
            self.library.target_poll(
                self.target, ctypes.byref(done), ctypes.c_size_t(1), ctypes.c_uint64(1000), ctypes.byref(count)
            )

    def hash(self, va, size):
        """The SHA-256 of what the device has."""
        hashed = hashlib.sha256()
        for start in range(0, size, CHUNK):
            part = min(CHUNK, size - start)
            ctypes.memset(self.at, 0xA5, part)
            self.copy(TO_HOST, va + start, part)
            hashed.update(ctypes.string_at(self.at, part))
        return hashed.hexdigest()

    def there_and_back(self, va, size):
        """Random bytes to the device and back."""
        data = os.urandom(size)
        ctypes.memmove(self.at, data, size)
        self.copy(TO_DEVICE, va, size)
        if self.hash(va, size) != hashlib.sha256(data).hexdigest():
            raise Wrong(f"{size} random bytes came back as others")

    def load(self, path, placement=None):
        """Loads a file; gives the address and the length of each tensor."""
        placement = placement and placement.encode()
        load = self.made("target_load", self.target, path.encode(), placement, 0, then="load_destroy")
        tensors, tensor = [], Tensor()
        while True:
            index = ctypes.c_uint64(len(tensors))
            try:
                self.library.load_tensor(load, index, ctypes.byref(tensor), None, ctypes.c_size_t(0))
            except Failed as e:
                if e.number != errno.ENOENT:
                    raise
                return tensors
            tensors.append((tensor.va, tensor.len))

    def close(self):
        """Gives all back, which works whatever became of the device."""
        failed = []
        for call, number in reversed(self.undo):
            try:
                getattr(self.library, call)(number)
            except Failed as e:
                # The load is gone although a device that is lost cannot be told.
                if call != "load_destroy" or e.number != errno.ENODEV:
                    failed.append(str(e))
        self.undo = []
        if failed:
            raise Wrong(f"what is given back is refused: {failed}")


def load(library, name, path, placement=None):
    device = Device(library, name)
    try:
        tensors = [(size, device.hash(va, size)) for va, size in device.load(path, placement)]
        device.there_and_back(device.device_memory(SCRATCH), SCRATCH)
        data, size = device.file_in_memory(path)
        read = hashlib.sha256(ctypes.string_at(data, size)).hexdigest() if size else None
    finally:
        device.close()
    print(json.dumps({"tensors": tensors, "read": [size, read]}))


def witness(library, name, path):
    seen = collections.Counter()
    wrong = []

    def told():
        return bool(select.select([0], [], [], 0)[0])

    def live():
        """Uses a device until it is lost, or is to rest."""
        device = Device(library, name)
        lost = None
        try:
            data, size = device.file_in_memory(path)
            tensors = device.load(path)
            right = [device.hash(*tensor) for tensor in tensors]
            if right != [hashlib.sha256(ctypes.string_at(data, size)).hexdigest()] or right != [expected]:
                raise Wrong(f"{path} is {right} on the device")
            scratch = device.device_memory(SCRATCH)
            seen["lives"] += 1
            while not told():
                device.there_and_back(scratch, SCRATCH)
                if [device.hash(*tensor) for tensor in tensors] != right:
                    raise Wrong(f"{path} has changed on the device")
                seen["copies"] += 1
                time.sleep(0.02)
        except Failed as e:
            lost = e
        finally:
            # What the device read from is the host's, whatever became of the device.
            if lost and "data" in locals() and hashlib.sha256(ctypes.string_at(data, size)).hexdigest() != expected:
                wrong.append("host memory has changed after the device was lost")
            device.close()
        if lost:
            raise lost

    with open(path, "rb") as file:
        expected = hashlib.sha256(file.read()).hexdigest()
    while os.read(0, 100):
        while not told():
            try:
                live()
            except Failed as e:
                seen[f"lost: {errno.errorcode.get(e.number, e.number)}, {e.call}"] += 1
                time.sleep(0.05)
            except Wrong as e:
                wrong.append(str(e))
        os.read(0, 100)
        give_back()
        print(json.dumps({"wrong": wrong, "seen": seen}), flush=True)
        seen.clear()
        wrong.clear()


def give_back():
    """Gives free memory back to the kernel, where the allocator can: what is left is in use."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def main():
    library, command, *arguments = sys.argv[1:]
    library = Library(library)
    try:
        if command == "version":
            print(library.calls.dml_abi_version())
        else:
            {"load": load, "witness": witness}[command](library, *arguments)
    except Failed as e:
        print(e, file=sys.stderr)
        return 1
    except Wrong as e:
        print(e, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
