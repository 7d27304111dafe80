"""Random GGUF and `.npy` files: what the formats' own libraries read, dmalane reads, and the same; where it differs on
purpose, docs/formats/containers.md says so and a name here does.

DMALANE_FILES says how many of each, 100 by default (scripts/nightly: 1000); DMALANE_FUZZ_SEED where they begin.
"""

import io
import logging
import os
import random
import struct

import pytest

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")
dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")

COUNT = int(os.environ.get("DMALANE_FILES", 100))
SEED = int(os.environ.get("DMALANE_FUZZ_SEED", 1))
logging.getLogger("gguf.gguf_reader").disabled = True


def ours(path):
    """Name -> shape and bytes; None for a file that is refused."""
    try:
        with dmalane.safe_open(path, framework="bytes") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            return {name: (list(tensor.shape), bytes(tensor)) for name, tensor in tensors.items()}
    except dmalane.Error as error:
        assert "panicked" not in str(error)
        return None


# ---- GGUF -----------------------------------------------------------------------------------------------------------

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
SIZES = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
# What is odd about a file, and whether the library and dmalane read it: the same for both unless a reason is given.
ODD = {
    "nothing": None,
    "a key twice": "the library renames the second one, llama.cpp refuses it",
    "an alignment of another type": None,
    "an alignment of 12": "the format asks for multiples of 8, which the library does not check",
    "a value that is not UTF-8": None,
    "an array in arrays": None,
    "an unknown type": "dmalane gives it the bytes up to the next tensor",
    "Q8_1": "36 bytes in ggml and 40 in the library: dmalane gives it the bytes up to the next tensor",
    "an offset that is not aligned": "the format asks for it, and the library does not check",
    "a name twice": None,
    "cut off": None,
    "version 1": None,
    "big-endian": "dmalane reads little-endian files",
    "bytes behind": None,
}


def text(value):
    return struct.pack("<Q", len(value)) + value


def scalar(chance, kind):
    form = SCALARS[kind]
    size = struct.calcsize(form)
    return bytes([chance.randint(0, 1)]) if kind == 7 else chance.randbytes(size)


def array(chance, depth):
    """The type of the elements, their number, and the elements."""
    if depth > 0:
        return struct.pack("<IQ", 9, 2) + array(chance, depth - 1) + array(chance, 0)
    count = chance.choice([0, 1, 3])
    if chance.random() < 0.3:
        return struct.pack("<IQ", 8, count) + b"".join(text(b"w" * i) for i in range(count))
    kind = chance.choice(list(SCALARS))
    return struct.pack("<IQ", kind, count) + b"".join(scalar(chance, kind) for _ in range(count))


def random_gguf(seed):
    """A file, and what is odd about it."""
    chance = random.Random(seed)
    odd = chance.choice(list(ODD)) if chance.random() < 0.6 else "nothing"
    pairs = []
    for i in range(chance.randint(0, 6)):
        kind = chance.choice([*SCALARS, 8, 9])
        body = text(b"caf\xc3\xa9" * chance.randint(0, 3)) if kind == 8 else None
        body = array(chance, 0) if kind == 9 else body or scalar(chance, kind)
        pairs.append(text(f"k.{i}".encode()) + struct.pack("<I", kind) + body)
    alignment = chance.choice([32, 32, 8, 64, 256])
    kind = 4
    if odd == "an alignment of 12":
        alignment = 12
    if odd == "an alignment of another type":
        kind = chance.choice([5, 10])
    if alignment != 32 or kind != 4:
        form = "<Q" if kind == 10 else "<I"
        pairs.append(text(b"general.alignment") + struct.pack("<I", kind) + struct.pack(form, alignment))
    more = {
        "a key twice": [text(b"twice") + struct.pack("<II", 4, i) for i in range(2)],
        "a value that is not UTF-8": [text(b"bad") + struct.pack("<I", 8) + text(b"a\xff")],
        "an array in arrays": [text(b"deep") + struct.pack("<I", 9) + array(chance, chance.randint(1, 9))],
    }
    pairs += more.get(odd, [])
    chance.shuffle(pairs)
    described, data, at = [], [], 0
    for i in range(chance.randint(1, 5)):
        number = chance.choice([kind for kind in SIZES if kind != 9])
        block, size = SIZES[number]
        if odd == "Q8_1" and i == 0:
            number, (block, size) = 9, SIZES[9]
        shape = [block * chance.randint(1, 2)] + [chance.choice([1, 2, 3]) for _ in range(chance.randint(0, 3))]
        bytes_of = size
        for dim in [shape[0] // block, *shape[1:]]:
            bytes_of *= dim
        if odd == "an unknown type" and i == 0:
            number = chance.choice([4, 5, 31, 77, 1 << 31])
        if odd == "an offset that is not aligned" and i == 0:
            at += 1
        name = b"t" if odd == "a name twice" and i < 2 else f"t.{i}".encode()
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        described.append(text(name) + dims + struct.pack("<IQ", number, at))
        data.append((at, chance.randbytes(bytes_of)))
        at = -(-(at + bytes_of) // alignment) * alignment
    version = 1 if odd == "version 1" else chance.choice([2, 3, 3])
    head = b"GGUF" + struct.pack("<IQQ", version, len(described), len(pairs)) + b"".join(pairs + described)
    if odd == "big-endian":
        # Only what comes first: no tensor, no pair.
        return b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + b"\0" * 8, odd
    head += b"\0" * (-len(head) % alignment)
    body = bytearray(at)
    for place, part in data:
        body[place : place + len(part)] = part
    if odd == "cut off":
        whole = head + body[: data[-1][0] + len(data[-1][1])]
        return bytes(whole[: chance.randrange(24, len(whole))]), odd
    return bytes(head + body) + (b"behind" if odd == "bytes behind" else b""), odd


def theirs_gguf(path):
    try:
        tensors = gguf.GGUFReader(path).tensors
    except Exception:
        return None
    return {tensor.name: ([int(n) for n in reversed(tensor.shape)], tensor.data.tobytes()) for tensor in tensors}


def test_gguf_files_are_read_as_the_library_does(tmp_path):
    path = tmp_path / "model.gguf"
    for seed in range(SEED, SEED + COUNT):
        data, odd = random_gguf(seed)
        path.write_bytes(data)
        got, want = ours(path), theirs_gguf(path)
        if ODD[odd] is None:
            assert got == want, f"seed {seed}, {odd}: {got} and not {want}"
        elif odd in ("an unknown type", "Q8_1"):
            assert got is not None, f"seed {seed}, {odd}"
            same = {name for name in want or {} if got[name] == want[name]}
            assert not want or len(same) >= len(want) - 1, f"seed {seed}, {odd}: {got} and not {want}"
        else:
            assert got is None, f"seed {seed}, {odd}: {got}"


# ---- .npy -----------------------------------------------------------------------------------------------------------

TYPES = ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8"]
# Types that no tensor has, and dmalane refuses.
OTHERS = [">i4", ">f8", "<c16", "<U3", "|S3", "|V4", "<M8[s]", "|O"]


def random_npy(seed):
    """A file, and whether dmalane reads it where NumPy does."""
    chance = random.Random(seed)
    shape = tuple(chance.choice([0, 1, 2, 3, 7]) for _ in range(chance.randint(0, 4)))
    described = chance.choice(TYPES) if chance.random() < 0.8 else chance.choice(OTHERS)
    columns = chance.random() < 0.3
    size = 8 if described == "|O" else np.dtype(described).itemsize
    elements = 1
    for dim in shape:
        elements *= dim
    data = chance.randbytes(elements * size)
    if described == "|b1":
        data = bytes(byte & 1 for byte in data)
    version = chance.choice([(1, 0), (1, 0), (2, 0), (3, 0)])
    long = "L" if chance.random() < 0.2 and version == (1, 0) else ""
    inside = ", ".join(f"{dim}{long}" for dim in shape) + ("," if len(shape) == 1 else "")
    pairs = [f"'descr': '{described}'", f"'fortran_order': {columns}", f"'shape': ({inside})"]
    if chance.random() < 0.2:
        chance.shuffle(pairs)
    header = ("{" + ", ".join(pairs) + chance.choice(["}", ", }"])).encode()
    length = "<H" if version == (1, 0) else "<I"
    before = 8 + struct.calcsize(length)
    header += b" " * (-(before + len(header) + 1) % 64) + b"\n"
    whole = b"\x93NUMPY" + bytes(version) + struct.pack(length, len(header)) + header + data
    odd = chance.random()
    if odd < 0.1 and data:
        whole = whole[: -chance.randint(1, len(data))]
    elif odd < 0.15:
        whole = whole[: chance.randrange(6, before + len(header))]
    elif odd < 0.2:
        whole += b"behind"
    by_columns = columns and sum(dim != 1 for dim in shape) > 1 and elements > 0
    return whole, described in TYPES and not by_columns and not 0.15 <= odd < 0.2


def theirs_npy(data):
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception:
        return None
    return {"array": (list(array.shape), array.tobytes())}


def test_npy_files_are_read_as_numpy_does(tmp_path):
    path = tmp_path / "array.npy"
    for seed in range(SEED, SEED + COUNT):
        data, reads = random_npy(seed)
        path.write_bytes(data)
        got, want = ours(path), theirs_npy(data)
        if reads or want is None:
            assert got == want, f"seed {seed}: {data[:200]}: {got} and not {want}"
        else:
            assert got is None, f"seed {seed}: {data[:200]}: {got}"
