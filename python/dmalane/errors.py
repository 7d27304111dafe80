"""Exceptions, with what they are about as attributes."""

from __future__ import annotations


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
        return _remade, (type(self), self.args, dict(self.__dict__))


def _remade(kind, args, fields):  # type: ignore[no-untyped-def]
    """An exception that comes from another process."""
    error = kind(*args)
    error.__dict__.update(fields)
    return error


class FormatError(Error, ValueError):
    """A file is not what it should be: `path`, and where known `tensor` and the file offset `offset`."""


class FileError(Error):
    """The kernel refused something: `path`, `errno`, and for a read `offset`."""


class ChangedError(FileError):
    """A file was changed, cut short or replaced while it was in use: `path`, and bytes `before` and now (`size`)."""


class IntegrityError(Error):
    """Bytes are not those of the manifest: the file (`path`), the `tensor`, and where it begins in the file (`offset`).
    `tensor` is None where a header or a gap differs, and `offset` where a length does."""


class OutOfMemoryError(Error, MemoryError):
    """There is no memory for a buffer, on the host or on the device."""


class MemoryLimitError(OutOfMemoryError):
    """The limit does not allow it: bytes `wanted`, the `limit`, and bytes in use (`used`)."""


class UnknownTensorError(Error, KeyError):
    """No tensor has this name: `tensor`."""


class ClosedError(Error, ValueError):
    """The file was closed, or the memory released."""


class DeviceError(Error, RuntimeError):
    """A device cannot be opened or failed."""


class CancelledError(Error):
    """The work was stopped before its end."""


__all__ = [
    "CancelledError",
    "ChangedError",
    "ClosedError",
    "DeviceError",
    "Error",
    "FileError",
    "FormatError",
    "IntegrityError",
    "MemoryLimitError",
    "OutOfMemoryError",
    "UnknownTensorError",
]
