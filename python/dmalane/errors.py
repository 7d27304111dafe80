"""Exceptions, with what they are about as attributes."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Self


class Error(Exception):
    """Base of all. Attributes that do not apply are None."""

    path: str | None
    tensor: str | None
    offset: int | None
    errno: int | None
    size: int | None
    before: int | None
    wanted: int | None
    limit: int | None
    used: int | None

    def __init__(self, message: str = "", **fields: object) -> None:
        super().__init__(message)
        for name in ("path", "tensor", "offset", "errno", "size", "before", "wanted", "limit", "used"):
            setattr(self, name, fields.get(name))

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return _remade, (getattr(self, "_plain", type(self)), self.args, {**self.__dict__, "errno": self.errno})


def _remade(kind, args, fields):  # type: ignore[no-untyped-def]
    """An exception that comes from another process."""
    error = kind(*args)
    for name, value in fields.items():
        setattr(error, name, value)
    return error


class _OfSafetensors(Error):
    """An error that is `safetensors.SafetensorError`, too, where safetensors is imported: who catches those of
    safetensors has imported it."""

    def __new__(cls, message: str = "", **fields: object) -> Self:
        theirs = getattr(sys.modules.get("safetensors"), "SafetensorError", None)
        if not isinstance(theirs, type) or issubclass(cls, theirs):
            return super().__new__(cls, message)
        if (cls, theirs) not in _BOTH:
            _BOTH[cls, theirs] = type(cls.__name__, (cls, theirs), {"__module__": cls.__module__, "_plain": cls})
        return super().__new__(_BOTH[cls, theirs], message)


_BOTH: dict[tuple[type, type], Any] = {}


class FormatError(_OfSafetensors, ValueError):
    """A file is not what it should be: `path`, and where known `tensor` and the file offset `offset`."""


class KeptError(Error):
    """A keeper does not answer, or has no such model, or no room for one."""


class FileError(Error, OSError):
    """The kernel refused something: `path`, `errno`, and for a read `offset`. Where Python has an exception for the
    `errno`, it is that, too."""

    def __new__(cls, message: str = "", **fields: object) -> Self:
        kind = _BY_ERRNO.get(fields.get("errno"), cls) if cls is FileError else cls
        return OSError.__new__(kind, message)  # type: ignore[return-value]

    @property
    def filename(self) -> str | None:
        """The path, by the name that it has in `OSError`."""
        return self.path

    @property
    def strerror(self) -> str | None:  # type: ignore[override]
        """What the `errno` means."""
        return None if self.errno is None else os.strerror(self.errno)


class FileMissingError(FileError, FileNotFoundError):
    """There is no such file."""


class FileForbiddenError(FileError, PermissionError):
    """The file may not be used so."""


class FileThereError(FileError, FileExistsError):
    """The file exists, and is not to be replaced."""


class FileIsFolderError(FileError, IsADirectoryError):
    """It is a directory, and a file is needed."""


class FileNotFolderError(FileError, NotADirectoryError):
    """A part of its path is no directory."""


_BY_ERRNO: dict[object, type[FileError]] = {
    errno.ENOENT: FileMissingError,
    errno.EACCES: FileForbiddenError,
    errno.EPERM: FileForbiddenError,
    errno.EEXIST: FileThereError,
    errno.EISDIR: FileIsFolderError,
    errno.ENOTDIR: FileNotFolderError,
}


class ChangedError(FileError):
    """A file was changed, cut short or replaced while it was in use: `path`, and bytes `before` and now (`size`)."""


class IntegrityError(Error):
    """Bytes are not those of the manifest: the file (`path`), the `tensor`, and where it begins in the file (`offset`).
    `tensor` is None where a header or a gap differs, and `offset` where a length does."""


class OutOfMemoryError(Error, MemoryError):
    """There is no memory for a buffer, on the host or on the device."""


class MemoryLimitError(OutOfMemoryError):
    """The limit does not allow it: bytes `wanted`, the `limit`, bytes in use (`used`), and the tensor (`tensor`) unless
    a whole model was asked for."""


class UnknownTensorError(_OfSafetensors, KeyError):
    """No tensor has this name: `tensor`."""


class ClosedError(_OfSafetensors, ValueError):
    """The file was closed, or the memory released."""


class DeviceError(Error, RuntimeError):
    """A device cannot be opened or failed."""


class ForkedError(Error, RuntimeError):
    """A child of `fork` used what its parent had opened. The child opens it again, or is started by "spawn"."""


class CancelledError(Error):
    """The work was stopped before its end."""


__all__ = [
    "CancelledError",
    "ChangedError",
    "ClosedError",
    "DeviceError",
    "Error",
    "FileError",
    "FileForbiddenError",
    "FileIsFolderError",
    "FileMissingError",
    "FileNotFolderError",
    "FileThereError",
    "ForkedError",
    "FormatError",
    "IntegrityError",
    "KeptError",
    "MemoryLimitError",
    "OutOfMemoryError",
    "UnknownTensorError",
]
