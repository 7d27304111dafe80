"""Capsules of DLPack, and a consumer of them by hand."""

import ctypes


class TensorOfDlpack(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = [("tensor", TensorOfDlpack), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p), ("deleter", DELETER),
        ("flags", ctypes.c_uint64), ("tensor", TensorOfDlpack),
    ]  # fmt: skip


class Capsule:
    """A consumer of a capsule, by hand."""

    def __init__(self, capsule):
        self.capsule = capsule
        self.name = self.call("GetName", ctypes.c_char_p)(capsule)
        pointer = self.call("GetPointer", ctypes.c_void_p, ctypes.c_char_p)(capsule, self.name)
        kind = {b"dltensor": Legacy, b"dltensor_versioned": Versioned}[self.name]
        self.at, self.managed = pointer, kind.from_address(pointer)
        self.tensor = self.managed.tensor

    @staticmethod
    def call(name, result, *arguments):
        function = getattr(ctypes.pythonapi, f"PyCapsule_{name}")
        function.restype, function.argtypes = result, [ctypes.py_object, *arguments]
        return function

    def consume(self):
        """Takes what is in it, so that the capsule frees nothing when it dies; returns the deleter's call."""
        self.used = b"used_" + self.name
        assert self.call("SetName", ctypes.c_int, ctypes.c_char_p)(self.capsule, self.used) == 0
        deleter, at = self.managed.deleter, self.at
        self.capsule = self.managed = self.tensor = None
        return lambda: deleter(at)
