"""The extension module. Use the package `dmalane`, which has all of it that is public."""

import os
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Literal, final

__version__: str

@final
class Tensor:
    """A tensor in host memory: its bytes with their name, type and shape."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """The type as the file spells it ("F32", "Q8_0"); empty for a file without structure."""
    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: of packed types in elements, not bytes."""
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int:
        """The address in this process, for drivers that register memory by address."""
    @property
    def kept(self) -> bool: ...
    @property
    def released(self) -> bool: ...
    def release(self) -> None:
        """Lets go of the memory. BufferError while a buffer of it is in use."""
    def tobytes(self) -> bytes:
        """A copy of the bytes."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Buffer:
    """Zeroed memory in whole pages, anonymous and aligned, that any driver can register."""

    def __new__(cls, size: int, *, align: int = 4096, huge: bool = True) -> Buffer: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def pages(self) -> str:
        """The kind of pages behind it."""
    def release(self) -> None: ...
    def tobytes(self) -> bytes: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Files:
    def __new__(
        cls,
        paths: Sequence[str | os.PathLike[str]],
        memory_limit: int | None = None,
        direct: bool | None = None,
        manifest: str | bytes | None = None,
        raw: bool = False,
        keep: bool = False,
    ) -> Files: ...
    @staticmethod
    def attached(name: str, verify: bool, device: Device | None) -> Files | None: ...
    @staticmethod
    def opened(path: str, name: str) -> Files: ...
    def within(self, memory_limit: int) -> Files: ...
    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def paths(self) -> list[str]: ...
    def containers(self) -> list[str]: ...
    def describe(self, name: str) -> tuple[str, list[int], int, str, int]: ...
    def load(
        self, align: int | None = None, progress: Callable[[int, int], object] | None = None
    ) -> list[Tensor]: ...
    def get(self, name: str) -> Tensor: ...
    def slice(self, name: str, ranges: Sequence[tuple[int, int]], shape: Sequence[int]) -> Tensor: ...
    def read(self, parts: Sequence[tuple[str, int, int, int]], len: int) -> Buffer: ...
    def read_onto(
        self,
        device: Device,
        parts: Sequence[tuple[str, int, int, int]],
        lent: Sequence[tuple[int, int]],
        owner: object,
    ) -> None: ...
    def check_slice(self, name: str) -> None: ...
    def apart(self, threads: int | None = None) -> Files: ...
    def stream(self, names: Set[str] | None = None) -> Stream: ...
    def references(self) -> dict[str, float]: ...
    def report(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

@final
class Stream:
    def __iter__(self) -> Iterator[Tensor]: ...
    def __next__(self) -> Tensor: ...

@final
class Device:
    """An open device."""

    def __new__(cls, spec: str) -> Device: ...
    @property
    def spec(self) -> str: ...
    def check_lent(self, address: int, nbytes: int) -> None:
        """Refuses memory of another library that this device does not reach."""
    def info(self) -> dict[str, Any]:
        """Its name, notes, free bytes, and its regions of memory."""
    def attach(self, name: str, verify: bool) -> list[DeviceTensor]: ...
    def attach_or_keep(
        self, paths: list[str], direct: bool | None, manifest: str | None, keep: bool
    ) -> list[DeviceTensor] | None: ...
    def load(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        placement: str | None = None,
        align: int = 0,
        verify: bool = False,
        manifest: str | bytes | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> tuple[list[DeviceTensor], dict[str, Any]]:
        """Loads files; returns their tensors, at multiples of `align` bytes at least, and the report."""
    def alloc(self, size: int) -> int:
        """Takes device memory until the device is closed; returns its address."""
    def write(self, address: int, data: Any) -> None:
        """Copies a buffer whose bytes lie one behind the other, such as bytes or an array of NumPy."""
    def read(self, address: int, size: int) -> bytes: ...
    def copy(self, source: int, to: int, size: int) -> None:
        """Copies within the device; the ranges do not overlap."""

@final
class DeviceTensor:
    """A tensor in device memory. The memory of a load is freed with its last tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int | None:
        """The device's virtual address; None for a tensor of no bytes."""
    def in_bytes(self) -> DeviceTensor:
        """The same memory as bytes: of type U8, with one dimension."""
    def tobytes(self) -> bytes:
        """Reads it back through the device's address space."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """The memory itself on a CUDA device, ready for any `stream`; with `dl_device=(1, 0)` a copy on the host."""
    def __dlpack_device__(self) -> tuple[int, int]:
        """(2, N) on `cuda:N`; BufferError for devices whose addresses are no pointers of CUDA."""

def remade_tensor(name: str, dtype: str, shape: Sequence[int], data: bytes) -> Tensor: ...
def alloc_and_read(path: str, start: int, stop: int | None, direct: bool | None) -> tuple[Buffer, dict[str, Any]]: ...
def save_file(
    path: str,
    tensors: Sequence[tuple[str, str, Sequence[int], memoryview]],
    metadata: dict[str, str] | None,
    overwrite: bool,
) -> int: ...
def manifest(paths: Sequence[str | os.PathLike[str]], sha256: bool) -> str:
    """The JSON of a manifest."""

def verify(paths: Sequence[str | os.PathLike[str]], manifest: str | bytes) -> str:
    """The differences as JSON."""

def cached_share(path: str | os.PathLike[str]) -> float | None:
    """The share of a file that is in the page cache; None where the kernel does not say."""

def room() -> int | None:
    """Bytes of memory that can be allocated now; None where the kernel does not say."""
