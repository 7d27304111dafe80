"""GGUF files as the format's own library writes them: every type of tensor is found where that library finds it."""

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64,
         "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}  # fmt: skip


def test_every_type(dmalane, tmp_path):
    rng = np.random.default_rng(1)
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_array("a.list", ["a", "bc", "d" * 5000])
    writer.add_string("a.text", "y" * 9000)
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        if kind.name in PLAIN:
            writer.add_tensor(f"t.{kind.name}", (rng.random((3, 5)) * 100).astype(PLAIN[kind.name]))
        else:
            # Four rows of two blocks each.
            writer.add_tensor(f"t.{kind.name}", rng.integers(0, 255, (4, 2 * size), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = dmalane.load(file, "--verify", "-d", "ram:16MiB")
    assert done.json["files"][0]["format"] == "gguf"
    found = {tensor["name"]: tensor for tensor in done.json["files"][0]["tensors"]}
    read = gguf.GGUFReader(file).tensors
    assert len(found) == len(read) == len(GGML_QUANT_SIZES)
    for tensor in read:
        ours = found[tensor.name]
        assert ours["shape"] == [int(n) for n in reversed(tensor.shape)], tensor.name
        # The library's size of Q8_1, which no file has, is not that of ggml: it is loaded up to the next tensor.
        known = tensor.tensor_type != GGMLQuantizationType.Q8_1
        assert ours["dtype"] == (tensor.tensor_type.name if known else f"type {int(tensor.tensor_type)}")
        assert ours["bytes"] == tensor.n_bytes, tensor.name
