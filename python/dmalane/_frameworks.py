"""Tensors of the extension module as arrays of NumPy and PyTorch, without a copy."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from ._arguments import integer, needed
from ._native import DeviceTensor, Tensor

# A framework, by the names that safetensors has for it too.
Framework = Literal["numpy", "np", "pt", "torch", "pytorch", "bytes"]
Torch = Literal["pt", "torch", "pytorch"]
TORCH = get_args(Torch)
_DEVICE = re.compile("(cpu|cuda|soft|ram|vulkan|mps|xpu|npu)(:|$)")

# Types that NumPy has itself, and those that it has from ml_dtypes.
_NUMPY = {
    "BOOL": "bool", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "": "u1",
}  # fmt: skip
_ML_DTYPES = {
    "BF16": "bfloat16", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2", "": "uint8",
}  # fmt: skip


def _numpy() -> Callable[[Tensor], Any]:
    why = 'arrays need NumPy: pip install numpy ml_dtypes, or framework="bytes" for tensors without it'
    numpy = needed("numpy", why)
    types: dict[str, Any] = {}

    def dtype_of(name: str) -> Any:
        if name in _NUMPY:
            return numpy.dtype(_NUMPY[name])
        if name in _ML_DTYPES:
            try:
                import ml_dtypes
            except ImportError:
                warnings.warn(
                    f"tensors of type {name} come as dmalane.Tensor, not as arrays: NumPy has the type from ml_dtypes "
                    '(pip install ml_dtypes); framework="bytes" asks for them so',
                    stacklevel=2,
                )
                return None
            return numpy.dtype(getattr(ml_dtypes, _ML_DTYPES[name], None) or "V1")
        return None

    def convert(tensor: Tensor) -> Any:
        name = tensor.dtype
        if name not in types:
            types[name] = dtype_of(name)
        dtype = types[name]
        # Packed types, GGUF's blocks, and without ml_dtypes those that NumPy does not know: the bytes.
        if dtype is None:
            return tensor
        if tensor.nbytes == 0:
            return numpy.empty(tensor.shape, dtype)
        array = numpy.ndarray(tensor.shape, dtype, tensor)
        if tensor.kept:
            array.flags.writeable = False
        return array

    return convert


def torch_type(name: str, shape: Sequence[int]) -> tuple[Any, tuple[int, ...]] | None:
    """PyTorch's type and shape for a tensor; None where it has no such type."""
    import torch

    dtype, shape = getattr(torch, _TORCH.get(name, "-"), None), tuple(shape)
    if name == "F4":
        # Two values in each element, as safetensors.torch has it.
        if not shape or shape[-1] % 2:
            return None
        shape = (*shape[:-1], shape[-1] // 2)
    return None if dtype is None else (dtype, shape)


def pytorch() -> Any:
    """The module torch."""
    return needed("torch", 'framework="pt" and dmalane.torch need PyTorch: pip install torch, or framework="numpy"')


def _torch() -> Callable[[Tensor], Any]:
    torch = pytorch()

    def convert(tensor: Tensor) -> Any:
        found = torch_type(tensor.dtype, tensor.shape)
        if found is None:
            return tensor
        dtype, shape = found
        if tensor.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(tensor, dtype=dtype).view(shape)

    return convert


def torch_on_gpu(tensor: DeviceTensor, device: Any) -> Any:
    """A tensor of PyTorch over the memory of one on a GPU of CUDA, which lives as long; itself where PyTorch has no
    such type."""
    import torch

    found = torch_type(tensor.dtype, tensor.shape)
    if found is None:
        return tensor
    dtype, shape = found
    if tensor.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    # DLPack and PyTorch do not have the same types.
    return torch.from_dlpack(tensor.in_bytes()).view(dtype).view(shape)


def on_cpu(device: object) -> bool:
    """Whether a device is the memory of the host."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(device, torch.device):
        return bool(device.type == "cpu")
    return isinstance(device, str) and device in ("cpu", "cpu:0")


def device_name(device: object) -> str:
    """What a device is called here: a name as it is, and CUDA's by name, number or `torch.device`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(device, torch.device):
        device = str(device)
    if (number := integer(device)) is not None:
        device = f"cuda:{number}"
    if not isinstance(device, str):
        raise TypeError(f"a device is a name, a number of CUDA or a torch.device, not {device!r}")
    return "cuda:0" if device == "cuda" else device


def torch_device(device: Any) -> Any:
    """PyTorch's device of a name, a number or itself."""
    torch = pytorch()
    if not isinstance(device, (str, torch.device)) and integer(device) is None:
        raise TypeError(f"a device is a name, a number or a torch.device, not {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device of PyTorch, which framework=\"pt\" needs: {error}") from None


def converter(framework: Framework) -> Callable[[Tensor], Any]:
    """The function that makes a framework's array of a tensor."""
    if framework == "bytes":
        return lambda tensor: tensor
    if framework in ("numpy", "np"):
        return _numpy()
    if framework in TORCH:
        return _torch()
    if isinstance(framework, str):
        hint = f"; is it a device? Then: device={framework!r}" if _DEVICE.match(framework) else ""
        raise ValueError(f'framework {framework!r} is none of "numpy", "pt", "bytes"{hint}')
    raise TypeError(f'a framework is "numpy", "pt" or "bytes", not {framework!r}')


def raw_bytes(value: Any) -> memoryview:
    """The bytes of an array, tensor or buffer, without a copy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            value = value.cpu()
        value = value.detach().contiguous()
        if value.numel() == 0:
            return memoryview(b"")
        return memoryview(value.reshape(-1).view(torch.uint8).numpy())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.size == 0:
            return memoryview(b"")
        value = numpy.ascontiguousarray(value)
        return memoryview(value.reshape(-1).view(numpy.uint8))
    return memoryview(value).cast("B")


_OF_NUMPY = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
    **{name: dtype for dtype, name in _ML_DTYPES.items()},
}  # fmt: skip


def describe(name: str, value: Any) -> tuple[str, list[int]]:
    """The type and the shape of an array or tensor, in the words of safetensors."""
    if isinstance(value, Tensor):
        return value.dtype, list(value.shape)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        spelled = str(value.dtype).removeprefix("torch.")
        shape = list(value.shape)
        for dtype, of_torch in _TORCH.items():
            if dtype and of_torch == spelled:
                if dtype == "F4" and shape:
                    shape[-1] *= 2
                return dtype, shape
    elif hasattr(value, "dtype"):
        spelled = value.dtype.name
        if spelled in _OF_NUMPY and value.dtype.isnative:
            return _OF_NUMPY[spelled], list(value.shape)
    kind = getattr(value, "dtype", type(value))
    raise TypeError(f"tensor {name!r} has a type that safetensors does not know: {kind}")
