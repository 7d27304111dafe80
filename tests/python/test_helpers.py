"""The helpers of these tests: a comparison that cannot fail would prove nothing."""

import pytest
from harness import DTYPE_BITS, Summary, build, entry, pattern, tensors_of


def test_a_built_file_is_read_back(tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(build({"b": entry("BF16", [2, 1], 4, 8), "a": entry("U8", [4], 0, 4)}, b"abcdefgh", pad=3))
    tensors = tensors_of(file)
    assert tensors == {"a": ("U8", (4,), b"abcd"), "b": ("BF16", (2, 1), b"efgh")}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_is_known_to_the_library(tmp_path, dtype):
    length = DTYPE_BITS[dtype]  # eight elements
    file = tmp_path / "a.safetensors"
    file.write_bytes(build({"a": entry(dtype, [8], 0, length)}, pattern(length)))
    assert tensors_of(file) == {"a": (dtype, (8,), pattern(length))}


def test_the_pattern_differs_from_place_to_place():
    data = pattern(1 << 20)
    assert len(data) == 1 << 20
    assert data[:4096] != data[4096:8192] and data[:65536] != data[65536:131072]
    assert pattern(0) == b"" and pattern(10) != pattern(10, seed=2)


def test_a_summary_wants_its_schema():
    summary = Summary('{"schema": 6, "tensors": 3, "bytes": 8, "files": [{"xxh3": "a"}]}')
    assert (summary.tensors, summary.bytes, summary.checksums) == (3, 8, ["a"])
    for text in ['{"schema": 1}', "[]"]:
        with pytest.raises(AssertionError):
            Summary(text)
