"""Bad input: one clear message that names the file and what is wrong, an exit status, and nothing left behind."""

import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from harness import build, entry, pattern


def u8(start, end):
    return entry("U8", [end - start], start, end)


# The file, and the message that it must cause (a regular expression; case does not matter).
BAD_FILES = {
    "empty": (b"", r"empty"),
    "one-byte": (b"x", r"\b1 byte|header"),
    "seven-bytes": (b"1234567", r"7 bytes|header"),
    "header-beyond-the-file": (struct.pack("<Q", 1000) + b"{}", r"header.*1000"),
    "header-just-beyond": (struct.pack("<Q", 3) + b"{}", r"header.*\b3\b"),
    "header-2-63": (struct.pack("<Q", 1 << 63) + b"{}", r"header.*9223372036854775808"),
    "header-2-64-1": (struct.pack("<Q", (1 << 64) - 1) + b"{}", r"header.*18446744073709551615"),
    "not-json": (build(b"{x", b""), r"header"),
    "not-an-object": (build(b"[]", b""), r"header"),
    "name-not-utf-8": (build(b'{"\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"), r"utf-?8.*set 10\b"),
    "overlap": (build({"first": u8(0, 8), "second": u8(4, 12)}, bytes(12)), r"second"),
    "same-bytes-twice": (build({"first": u8(0, 8), "second": u8(0, 8)}, bytes(8)), r"first|second"),
    "hole": (build({"first": u8(0, 4), "second": u8(8, 12)}, bytes(12)), r"second"),
    "out-of-range": (build({"first": u8(0, 4), "second": u8(4, 12)}, bytes(6)), r"second.*(end|beyond)"),
    "far-out-of-range": (build({"first": entry("U8", [1 << 60], 0, 1 << 60)}, b"a"), r"first.*(end|beyond)"),
    "too-many-bits": (build({"first": entry("U8", [1 << 62], 0, 1 << 62)}, b"a"), r"first.*overflow"),
    "backwards": (build({"first": entry("U8", [0], 4, 0)}, bytes(4)), r"first"),
    "negative-offset": (build(b'{"first":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}}', b"a"), r"first"),
    "unknown-dtype": (build({"first": entry("Q7", [4], 0, 4)}, bytes(4)), r"first.*Q7"),
    "shape-against-offsets": (build({"first": entry("F32", [3], 0, 8)}, bytes(8)), r"first"),
    "shape-overflows": (build({"first": entry("U8", [1 << 63, 4], 0, 4)}, bytes(4)), r"first"),
    "bytes-after-the-last": (build({"first": u8(0, 4)}, bytes(9)), r"5 bytes"),
    "bytes-after-no-tensor": (build({}, bytes(9)), r"9 bytes"),
}


@pytest.fixture
def files(tmp_path):
    """Two directories: one for inputs, one that a failed load must leave empty."""
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    return tmp_path


def assert_refused(done, file, says, files=None):
    assert done.returncode > 0, f"exit status {done.returncode}\n{done.stderr}"
    assert done.returncode != 101 and "panicked" not in done.stderr, done.stderr
    assert done.stdout == "", "what failed must not look like a result"
    assert Path(file).name in done.stderr, done.stderr
    assert re.search(says, done.stderr.replace("\n", " "), re.IGNORECASE), done.stderr
    if files is not None:
        assert os.listdir(files / "out") == [], "a failed load left a file"


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file(dmalane, files, name):
    content, says = BAD_FILES[name]
    file = files / "in" / f"{name}.safetensors"
    file.write_bytes(content)
    before = shared_memory()
    done = dmalane.run("load", file, "--json", "--trace", files / "out" / "trace")
    assert_refused(done, file, says, files)
    assert os.listdir(files / "in") == [file.name]
    assert shared_memory() <= before, "shared memory was left behind"


@pytest.mark.parametrize("name", ["empty", "unknown-dtype", "out-of-range"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_bad_shard_among_good_ones(dmalane, files, name, position):
    shards = []
    for i in range(3):
        file = files / "in" / f"shard-{i}.safetensors"
        file.write_bytes(build({f"t{i}": u8(0, 100_000)}, pattern(100_000)))
        shards.append(file)
    content, says = BAD_FILES[name]
    shards[position].write_bytes(content)
    done = dmalane.run("load", *shards, "--json", "--trace", files / "out" / "trace")
    assert_refused(done, shards[position], says, files)


def test_a_header_above_the_limit(dmalane, files):
    file = files / "in" / "long-header.safetensors"
    length = 200_000_000
    with file.open("wb") as f:
        f.write(struct.pack("<Q", length))
        f.truncate(8 + length)  # sparse
    done = dmalane.run("load", file, "--json")
    assert_refused(done, file, r"header.*200000000", files)


def test_a_directory(dmalane, files):
    directory = files / "in" / "model.safetensors"
    directory.mkdir()
    assert_refused(dmalane.run("load", directory, "--json"), directory, r"directory", files)


def test_a_missing_file(dmalane, files):
    file = files / "in" / "nowhere.safetensors"
    assert_refused(dmalane.run("load", file, "--json"), file, r"no such file|not found|does not exist", files)


def test_a_fifo_does_not_hang(dmalane, files):
    fifo = files / "in" / "pipe.safetensors"
    os.mkfifo(fifo)
    assert_refused(dmalane.run("load", fifo, "--json", timeout=30), fifo, r"regular file|not a file|fifo|pipe", files)


def test_no_permission(dmalane):
    # In a directory of its own: root reads everything, so as root the program runs as nobody, who must be able to reach
    # both the program and the file's directory.
    place = Path(tempfile.mkdtemp(prefix="dmalane-test-"))
    try:
        place.chmod(0o755)
        program = place / "dmalane"
        shutil.copy(dmalane.binary, program)
        program.chmod(0o755)
        file = place / "secret.safetensors"
        file.write_bytes(build({"a": u8(0, 4)}, b"abcd"))
        file.chmod(0)
        prefix = []
        if os.geteuid() == 0:
            prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            if shutil.which("setpriv") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
                pytest.skip("root may read everything, and setpriv does not work here")
            if subprocess.run([*prefix, program, "--help"], capture_output=True).returncode:
                pytest.skip(f"nobody may not run programs from {place.parent}")
        done = type(dmalane)(program).run("load", file, "--json", prefix=prefix)
        assert_refused(done, file, r"permission denied")
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("placement", ["ddr", "hbm-half", "hbm"])
def test_a_card_too_small(dmalane, files, placement):
    length = 768 << 20
    file = files / "in" / "large.safetensors"
    content = build({"a": u8(0, length)}, b"")
    with file.open("wb") as f:
        f.write(content)
        f.truncate(len(content) + length)  # sparse, and never read
    card = "ddr" if placement == "ddr" else "hbm"
    options = ["--placement", placement, "-d", f"soft,{card}=512MiB"]
    done = dmalane.run("load", file, "--json", "--trace", files / "out" / "trace", *options)
    assert_refused(done, file, rf"{length >> 20} MiB are needed", files)
    assert "-d soft,ddr=SIZE,hbm=SIZE" in done.stderr, "the message says what would help"


def test_a_tiny_card(dmalane, files):
    file = files / "in" / "large.safetensors"
    file.write_bytes(build({"a": u8(0, 4 << 20)}, pattern(4 << 20)))
    done = dmalane.run("load", file, "--json", "-d", "soft,ddr=1MiB", "--trace", files / "out" / "trace")
    assert_refused(done, file, r"4 MiB are needed", files)


def test_an_output_in_a_place_that_is_not_there(dmalane, files):
    file = files / "in" / "fine.safetensors"
    file.write_bytes(build({"a": u8(0, 4)}, b"abcd"))
    target = files / "nowhere" / "binds"
    done = dmalane.run("load", file, "--json", "--trace", target)
    assert_refused(done, target, r"no such file|not found|exist", files)


@pytest.mark.parametrize(
    "options",
    [["--placement", "cache"], ["-d", "soft,fragmentation=2"], ["-d", "soft,fragmentation=x"], ["--chunk", "0"],
     ["--chunk", "1XiB"], ["--mm-channel", "2"], ["--buffered", "--direct"], ["--no-such-option"]],
    ids=lambda o: " ".join(o),
)  # fmt: skip
def test_an_impossible_option(dmalane, files, options):
    file = files / "in" / "fine.safetensors"
    file.write_bytes(build({"a": u8(0, 4)}, b"abcd"))
    done = dmalane.run("load", file, "--json", *options)
    assert done.returncode > 0 and done.stdout == "" and "panicked" not in done.stderr
    assert options[0] in done.stderr, done.stderr


def test_truncated_while_being_read(dmalane, files):
    """The file shrinks once the load is under way.

    The program is stopped in the middle: its card memory has begun to fill, and 2 GiB cannot have passed within the
    millisecond between two looks. Only where it was too fast all the same does the test say nothing.
    """
    length = 2 << 30
    header = {f"t{i}": u8(i * (length // 64), (i + 1) * (length // 64)) for i in range(64)}
    file = files / "in" / "shrinks.safetensors"
    content = build(header, b"")
    with file.open("wb") as f:
        f.write(content)
        f.truncate(len(content) + length)  # sparse: the card gets zeros
    command = dmalane.command("load", file, "--json", "--chunk", "1MiB", "--trace", files / "out" / "trace")
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        started = time.monotonic()
        while process.poll() is None and card_bytes(process.pid) < 128 << 20:
            assert time.monotonic() - started < 60, "the load does not get anywhere"
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            while state(process.pid) not in "TZX":
                time.sleep(0.001)
        if process.poll() is not None or card_bytes(process.pid) > length // 2:
            pytest.skip("the load was over before it could be stopped")
        os.truncate(file, 32 << 20)
        process.send_signal(signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    assert_refused(done, file, r"t\d+|changed|shrunk|shorter|truncated|end of (the )?file", files)


def card_bytes(pid):
    """Memory of the process: the card's, for the most part."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = re.findall(r"^(?:RssAnon|RssShmem|HugetlbPages):\s+(\d+) kB", status, re.MULTILINE)
    return sum(int(kib) << 10 for kib in fields)


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def shared_memory():
    """Names of shared memory that outlive a process."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
