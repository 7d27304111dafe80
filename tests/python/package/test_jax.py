"""jax, where it is installed: by DLPack without a copy, and by NumPy."""

import numpy as np
import pytest
from package.models import random_tensors, write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")
jax = pytest.importorskip("jax", reason="jax is not installed")

# Types of both DLPack and jax.
BOTH = ["BOOL", "U8", "I8", "U16", "I16", "F16", "BF16", "I32", "U32", "F32", "C64"]


def test_jax_takes_tensors_by_dlpack_and_by_numpy(tmp_path):
    tensors = {name: tensor for name, tensor in random_tensors().items() if name.split(".")[0] in BOTH}
    path = write_model(tmp_path / "m.safetensors", tensors)
    by_bytes, by_numpy = dmalane.load_file(path, "bytes", align=64), dmalane.load_file(path)
    for name, (_, shape, data) in tensors.items():
        for array in (jax.dlpack.from_dlpack(by_bytes[name]), jax.numpy.asarray(by_numpy[name])):
            assert array.shape == tuple(shape) and np.asarray(array).tobytes() == data, name


def test_dlpack_shares_the_memory_with_jax(tmp_path):
    values = np.arange(1 << 16, dtype="f4")
    dmalane.save_file({"t": values}, tmp_path / "m.safetensors")
    tensor = dmalane.load_file(tmp_path / "m.safetensors", "bytes", align=4096)["t"]
    array = jax.dlpack.from_dlpack(tensor)
    assert array.unsafe_buffer_pointer() == tensor.address
    del tensor
    assert float(jax.numpy.sum(array)) == values.sum()


def test_tensors_that_are_lent_go_to_jax(large):
    with dmalane.safe_open(large, "bytes", memory_limit="16MiB") as f:
        total = 0
        for _, tensor in f.tensors():
            # A copy: jax keeps what it gets by DLPack for as long as it likes.
            total += jax.numpy.array(np.from_dlpack(tensor), copy=True).size
    assert total == 24 << 20
