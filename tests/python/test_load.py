"""Files through the whole path: names, types, shapes and checksums are those of Python's safetensors, and every tensor
that is read back through the card's MMU has the file's bytes. Where the memory of the device is a file, its bytes are
compared here.
"""

import os
import shutil

import pytest
import safetensors.numpy
import xxhash
from harness import DTYPE_BITS, build, entry, pattern, tensors_of

PLACEMENTS = ["ddr", "hbm-half", "hbm"]
FRAGMENTATIONS = ["0", "0.5", "1"]
CHANNELS = ["auto", "0", "1"]
SHARDS = 7


def pairs(first, second, shift=0):
    """Each value of the first list with one of the second, others by another shift; with all in scripts/nightly."""
    if os.environ.get("DMALANE_LONG"):
        return [(a, b) for a in first for b in second]
    return [(a, second[(i + shift) % len(second)]) for i, a in enumerate(first)]


@pytest.fixture(scope="module")
def shards(minilm, tmp_path_factory):
    """The real file split into seven, as large models come."""
    directory = tmp_path_factory.mktemp("shards")
    tensors = safetensors.numpy.load_file(minilm)
    names = sorted(tensors)
    files = []
    for i in range(SHARDS):
        file = directory / f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in names[i::SHARDS]}, file)
        files.append(file)
    yield files
    shutil.rmtree(directory)


def checked(dmalane, files, *options):
    """Loads files, which are read back and compared, and checks what is said of them."""
    summary = dmalane.load(*files, "--verify", *options)
    expected = [tensors_of(file) for file in files]
    assert summary.headers == [{name: (t[0], t[1], len(t[2])) for name, t in file.items()} for file in expected]
    assert summary.checksums == [xxhash.xxh3_64(file.read_bytes()).hexdigest() for file in files]
    assert summary.bytes == sum(file.stat().st_size for file in files)
    assert summary.tensors == sum(len(file) for file in expected)
    return summary


@pytest.mark.parametrize(("placement", "fragmentation"), pairs(PLACEMENTS, FRAGMENTATIONS))
def test_the_real_file(dmalane, minilm, placement, fragmentation):
    checked(dmalane, [minilm], "--placement", placement, "-d", f"soft,fragmentation={fragmentation}")


@pytest.mark.parametrize(("placement", "fragmentation"), pairs(PLACEMENTS, FRAGMENTATIONS, 1))
def test_the_real_file_in_seven_shards(dmalane, shards, placement, fragmentation):
    checked(dmalane, shards, "--placement", placement, "-d", f"soft,fragmentation={fragmentation}")


@pytest.mark.parametrize(("placement", "channel"), pairs(PLACEMENTS, CHANNELS, 1))
def test_the_real_file_over_each_channel(dmalane, minilm, placement, channel):
    checked(dmalane, [minilm], "--placement", placement, "--mm-channel", channel)


@pytest.mark.parametrize(("channel", "device"), pairs(CHANNELS, ["vulkan:0,channels=2", "vulkan:0,flat,channels=2"]))
def test_the_real_file_on_a_gpu(dmalane, minilm, device, channel):
    listed = dmalane.run("devices")
    if "vulkan:0\n" not in listed.stdout:
        pytest.skip("no Vulkan driver: apt install libvulkan1 mesa-vulkan-drivers")
    checked(dmalane, [minilm], "-d", device, "--mm-channel", channel)
    dmalane.load(minilm, "--verify", "-d", device, "--mm-channel", channel)


@pytest.mark.parametrize("how", ["--buffered", "--direct"])
def test_the_real_file_read_both_ways(dmalane, minilm, shards, how):
    if how == "--direct" and not direct_works(minilm):
        pytest.skip(f"{minilm.parent} is on a file system without O_DIRECT")
    checked(dmalane, [minilm], how)
    checked(dmalane, shards, how)


def test_the_real_file_in_small_chunks(dmalane, minilm, shards):
    checked(dmalane, [minilm], "--chunk", "1MiB", "-d", "soft,fragmentation=1")
    checked(dmalane, shards, "--chunk", "1MiB")


def test_the_memory_of_a_device(dmalane, tmp_path, minilm):
    memory = tmp_path / "memory"
    with memory.open("wb") as file:
        file.truncate(128 << 20)
    (at,) = checked(dmalane, [minilm], "-d", f"file:{memory}").addresses
    held, tensors = memory.read_bytes(), tensors_of(minilm)
    memory.unlink()
    assert sorted(at) == sorted(tensors)
    for name, (_, _, data) in tensors.items():
        assert not data or held[at[name] : at[name] + len(data)] == data, name


def test_the_checksum_is_that_of_the_file(dmalane, minilm, shards):
    for placement, chunk in [("ddr", "16MiB"), ("hbm", "1MiB")]:
        for files in [[minilm], shards]:
            summary = dmalane.load(*files, "--placement", placement, "--chunk", chunk)
            assert summary.checksums == [xxhash.xxh3_64(file.read_bytes()).hexdigest() for file in files]


def test_every_dtype(dmalane, tmp_path):
    header, data = {}, b""
    for i, (dtype, bits) in enumerate(DTYPE_BITS.items()):
        elements = 8 * (101 + 997 * i)
        length = elements * bits // 8
        header[f"tensor.{dtype}"] = entry(dtype, [8, elements // 8], len(data), len(data) + length)
        data += pattern(length, seed=i)
    file = tmp_path / "dtypes.safetensors"
    file.write_bytes(build(header, data))
    checked(dmalane, [file])


@pytest.mark.parametrize("pad", [0, 1, 3, 4095])
def test_tensors_at_odd_places(dmalane, tmp_path, pad):
    # Neither the file's blocks nor the card's pages fall on the edges of these tensors.
    sizes = [1, 511, 512, 513, 4095, 4096, 4097, 1, 65_537, (1 << 20) - 1, (1 << 20) + 1, 3 << 20, 7]
    header, at = {}, 0
    for i, size in enumerate(sizes):
        header[f"t{i}"] = entry("U8", [size], at, at + size)
        at += size
    file = tmp_path / "odd.safetensors"
    file.write_bytes(build(header, pattern(at), pad=pad))
    checked(dmalane, [file], "--chunk", "1MiB")


def test_zero_size_tensors_and_scalars(dmalane, tmp_path):
    header = {
        "empty.first": entry("F32", [0], 0, 0),
        "a": entry("U8", [5], 0, 5),
        "empty.between": entry("BF16", [3, 0, 2], 5, 5),
        "scalar": entry("F32", [], 5, 9),
        "empty.last": entry("I64", [0], 9, 9),
    }
    file = tmp_path / "zero.safetensors"
    file.write_bytes(build(header, b"abcdefghi"))
    checked(dmalane, [file])


@pytest.mark.parametrize("header", [{}, {"__metadata__": {"format": "pt"}}], ids=["nothing", "metadata"])
def test_a_file_without_tensors(dmalane, tmp_path, header):
    file = tmp_path / "none.safetensors"
    file.write_bytes(build(header, b""))
    checked(dmalane, [file])


def test_names_of_all_kinds(dmalane, tmp_path):
    names = ["", " ", "a/b", "../up", "\u00e4\u00f6\u00fc \u2603 \U0001f980", 'quo"te\\back', "new\nline", "x" * 4096]
    header = {name: entry("U8", [3], 3 * i, 3 * i + 3) for i, name in enumerate(names)}
    file = tmp_path / "names \u2603.safetensors"
    file.write_bytes(build(header, pattern(3 * len(names))))
    checked(dmalane, [file])


def test_many_tensors(dmalane, tmp_path):
    count = 100_000 if os.environ.get("DMALANE_LONG") else 20_000
    header = {f"model.layers.{i}.weight": entry("U8", [2, 2], 4 * i, 4 * i + 4) for i in range(count)}
    file = tmp_path / "many.safetensors"
    file.write_bytes(build(header, pattern(4 * count)))
    summary = checked(dmalane, [file])
    assert summary.tensors == count


def test_a_load_leaves_its_inputs_alone(dmalane, tmp_path):
    file = tmp_path / "kept.safetensors"
    file.write_bytes(build({"a": entry("U8", [70_000], 0, 70_000)}, pattern(70_000)))
    file.chmod(0o444)
    before = (file.read_bytes(), file.stat().st_mtime_ns)
    checked(dmalane, [file])
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert sorted(os.listdir(tmp_path)) == ["kept.safetensors"]


def direct_works(path):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True
