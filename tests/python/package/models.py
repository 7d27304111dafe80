"""Model files for the tests of the package."""

import json
import os
import random
import struct
from pathlib import Path

# Bits of an element of every type that the format knows.
DTYPES = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def write_model(path, tensors, metadata=None, pad=8):
    """Writes a safetensors file. `tensors`: name -> (dtype, shape, bytes). With an odd `pad`, all offsets are odd."""
    header, at = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if pad != 8:
        text += b" " * pad
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def random_tensors(seed=1):
    """A tensor of each type, a scalar and an empty one of each, with bytes of which none is an invalid bool."""
    chance = random.Random(seed)
    tensors = {}
    for dtype, bits in DTYPES.items():
        for kind, shape in (("matrix", [3, 16]), ("scalar", []), ("empty", [0, 4])):
            elements = 1
            for dim in shape:
                elements *= dim
            if elements * bits % 8:
                continue
            data = chance.randbytes(elements * bits // 8)
            if dtype == "BOOL":
                data = bytes(byte & 1 for byte in data)
            tensors[f"{dtype}.{kind}"] = (dtype, shape, data)
    return tensors


def sparse_model(path, size):
    """A file of one tensor of zeroes, "t", which takes no space on the disk."""
    write_model(path, {"t": ("U8", [size], b"")})
    text = path.read_bytes()[8:].replace(b'"data_offsets": [0, 0]', b'"data_offsets": [0, %d]' % size)
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)
    return str(path)


def sparse_shards(folder, size, count, shards=5):
    """Files of `count` tensors of zeroes of `size` bytes in all, which take no space on the disk; their paths."""
    folder.mkdir(exist_ok=True)
    paths, each, nbytes = [], count // shards, size // count
    for shard in range(shards):
        names = [f"layer.{shard}.{n}" for n in range(each)]
        header = {name: {"dtype": "U8", "shape": [nbytes], "data_offsets": [n * nbytes, (n + 1) * nbytes]}
                  for n, name in enumerate(names)}  # fmt: skip
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"{size}-{count}-{shard}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(path, 8 + len(text) + each * nbytes)
        paths.append(path)
    return paths
