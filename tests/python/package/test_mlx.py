"""mlx, where it is installed: it copies what NumPy has, and takes the types that NumPy lacks by their bits."""

import numpy as np
import pytest
from package.models import random_tensors, write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")
mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

# Types of both NumPy and mlx. mlx makes float32 of F64.
BOTH = ["BOOL", "U8", "I8", "U16", "I16", "F16", "I32", "U32", "F32", "C64", "I64", "U64"]


def test_mlx_takes_tensors_by_numpy(tmp_path):
    tensors = {name: tensor for name, tensor in random_tensors().items() if name.split(".")[0] in BOTH}
    path = write_model(tmp_path / "m.safetensors", tensors)
    with dmalane.safe_open(path, "np", memory_limit="64MiB") as lent:
        for name, array in [*dmalane.load_file(path).items(), *lent.tensors()]:
            _, shape, data = tensors[name]
            array = mx.array(array)
            assert array.shape == tuple(shape) and np.asarray(array).tobytes() == data, name


def test_mlx_takes_bfloat16_by_its_bits(tmp_path):
    values = np.arange(-8, 8, dtype="f4")
    bits = (values.view("u4") >> 16).astype("u2")
    path = write_model(tmp_path / "m.safetensors", {"t": ("BF16", [4, 4], bits.tobytes())})
    array = mx.array(dmalane.load_file(path)["t"].view("u2")).view(mx.bfloat16)
    assert array.shape == (4, 4) and np.array_equal(np.asarray(array.astype(mx.float32)).ravel(), values)
