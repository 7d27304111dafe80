"""Loads a small file with the installed package, and compares its bytes; needs nothing else. `scripts/wheels` runs it
with every Python that it finds."""

import json
import platform
import struct
import sys
import tempfile
from pathlib import Path

import dmalane

numbers = b"".join(struct.pack("<H", n % 65536) for n in range(70000))
header = json.dumps({"t": {"dtype": "U16", "shape": [70000], "data_offsets": [0, len(numbers)]}}).encode()
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + numbers)
    tensor = dmalane.load_file(path, framework="bytes")["t"]
if (tensor.dtype, tensor.shape, tensor.tobytes()) != ("U16", (70000,), numbers):
    sys.exit("the tensor differs from the file")
print(f"Python {platform.python_version()}, {platform.machine()}: dmalane {dmalane.__version__}")
