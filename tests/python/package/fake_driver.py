"""A driver of CUDA in software, and a caller of it as a framework is one."""

import ctypes
import mmap


class FakeDriver:
    """The driver in software; a caller of it as a framework is one, with a stream of its own."""

    def __init__(self, path):
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.library.fake_cuda_control.restype = ctypes.c_int64
        self.control("reset")

    def control(self, command):
        answer = self.library.fake_cuda_control(command.encode())
        assert answer >= 0, command
        return answer

    def check(self, name, *arguments):
        assert getattr(self.library, name)(*arguments) == 0, name

    def begin(self):
        """The context of the GPU, current on this thread; a stream; and a page of host memory for copies."""
        context, self.stream = ctypes.c_uint64(), ctypes.c_uint64()
        self.check("cuInit", 0)
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.check("cuCtxPushCurrent_v2", context)
        self.check("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.page = mmap.mmap(-1, 4096)
        self.page_at = ctypes.addressof(ctypes.c_char.from_buffer(self.page))
        self.check("cuMemHostRegister_v2", ctypes.c_uint64(self.page_at), ctypes.c_size_t(4096), 1)

    def begin_read(self, pointer, size):
        to, size = ctypes.c_uint64(self.page_at), ctypes.c_size_t(size)
        self.check("cuMemcpyDtoHAsync_v2", to, ctypes.c_uint64(pointer), size, self.stream)

    def read(self, pointer, size):
        self.begin_read(pointer, size)
        self.check("cuStreamSynchronize", self.stream)
        return self.page[:size]

    def end(self):
        self.check("cuStreamSynchronize", self.stream)
        self.check("cuMemHostUnregister", ctypes.c_uint64(self.page_at))
        self.check("cuStreamDestroy_v2", self.stream)
        self.check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_uint64()))
        self.check("cuDevicePrimaryCtxRelease_v2", 0)

    def report(self):
        """Objects that are left, and what callers did wrong."""
        text = ctypes.create_string_buffer(1 << 16)
        self.library.fake_cuda_report(text, ctypes.c_size_t(len(text)))
        return text.value.decode().split("\n")[:2]
