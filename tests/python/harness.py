"""Running the program, and safetensors files made and read here, so that tests say only what they are about."""

import json
import os
import struct
import subprocess
from pathlib import Path

import safetensors

# Bits of an element of every type that the format knows.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


class Dmalane:
    """The program."""

    def __init__(self, binary):
        self.binary = Path(binary)

    def command(self, *args):
        return [str(self.binary), *map(str, args)]

    def run(self, *args, timeout=120, prefix=()):
        """Runs it to its end, without a terminal or stdin."""
        return subprocess.run(
            [*map(str, prefix), *self.command(*args)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout,
            env=os.environ | {"RUST_BACKTRACE": "0", "COLUMNS": "10000"},  # each cause in a line
        )

    def load(self, *args, **kwargs):
        """Runs `dmalane load ... --json`, which must succeed, and gives what it says."""
        done = self.run("load", *args, "--json", **kwargs)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
        return Summary(done.stdout)


class Summary:
    """The JSON object of `dmalane load --json`. The only place in the tests that knows its fields."""

    def __init__(self, stdout):
        self.json = json.loads(stdout)
        assert isinstance(self.json, dict), stdout
        assert self.json["schema"] == 6

    @property
    def tensors(self):
        """How many tensors were loaded, over all files."""
        return self.json["tensors"]

    @property
    def bytes(self):
        """Bytes of the files, headers included."""
        return self.json["bytes"]

    @property
    def checksums(self):
        """The XXH3-64 of each file in hexadecimal, in the order given."""
        return [file["xxh3"] for file in self.json["files"]]

    @property
    def headers(self):
        """Name -> (dtype, shape, bytes) of the tensors of each file."""
        return [
            {t["name"]: (t["dtype"], tuple(t["shape"]), t["bytes"]) for t in file["tensors"]}
            for file in self.json["files"]
        ]

    @property
    def addresses(self):
        """Name -> device address of the tensors of each file, None for one without bytes."""
        return [{t["name"]: t["device_va"] for t in file["tensors"]} for file in self.json["files"]]


def build(header, data, pad=0):
    """A safetensors file: length, header (a dict, or bytes as they are) and `pad` spaces, data."""
    if not isinstance(header, bytes):
        header = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * pad
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype, shape, start, end):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def pattern(length, seed=1):
    """Bytes that differ from place to place, the same in every run."""
    block = bytes((i * 131 + (i >> 8) * 17 + seed * 29) & 0xFF for i in range(min(length, 65_521)))
    return (block * (length // max(len(block), 1) + 1))[:length]


def tensors_of(path):
    """Name -> (dtype, shape, bytes), as Python's safetensors reads the file. Raw bytes, so every dtype will do."""
    with open(path, "rb") as file:
        read = safetensors.deserialize(file.read())
    return {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in read}
