"""Hostile traces: every line gets an answer by name, no memory is lost on them, and what was there stays."""

import json
import resource
import subprocess

import pytest

HEADER = {"trace": "dmalane-vm", "version": 1, "format": "agx-uat", "range": {"va": "0x4000", "len": "0x7fffffc000"},
          "reserved": {"va": "0x40000000", "len": "0x100000"}, "null_page": {"pa": "0x4000", "len": 16384}}  # fmt: skip
BO = {"op": "bo", "id": 1, "segments": [{"pa": "0x100000000", "len": "0x40000"}]}
BIND = {"op": "bind", "va": "0x8000", "bo": 1, "offset": 0, "len": 16384, "access": "rw"}
TOP = (1 << 64) - 1


def bind(**changes):
    return BIND | changes


def repeat(**changes):
    return BIND | {"op": "repeat", "page": 16384, "len": 32768} | changes


def bo(*segments, id=2):
    return {"op": "bo", "id": id, "segments": [{"pa": pa, "len": length} for pa, length in segments]}


# A line (an object, or text as it is) and the name of the error that it must get.
BAD_LINES = {
    "not-json": ("{", "bad_line"),
    "not-an-object": ("[1]", "bad_line"),
    "two-objects": ("{}{}", "bad_line"),
    "not-utf-8": (b'{"op":"\xff"}', "bad_line"),
    "nul": (b"\0", "bad_line"),
    "deep": ("[" * 1_000_000, "bad_line"),
    "deep-batch": ('{"op":"batch","ops":[' * 10_000, "bad_line"),
    "unknown-operation": ({"op": "frob"}, "bad_line"),
    "unknown-field": (bind(size=1), "bad_line"),
    "negative": (bind(va=-1), "bad_line"),
    "fraction": (bind(len=0.5), "bad_line"),
    "65-bits": (bind(va=1 << 64), "bad_line"),
    "65-bits-as-text": (bind(va="0x10000000000000000"), "bad_line"),
    "no-access": (bind(access="---"), "bad_line"),
    "missing": ({"op": "unbind", "va": 0}, "missing_field"),
    "too-many-fields": ({"op": "unbind", "va": 0, "len": 1, "bo": 1}, "unexpected_field"),
    "unknown-bo": (bind(bo=9), "no_bo"),
    "unknown-bo-2-63": (bind(bo=1 << 63), "no_bo"),
    "destroy-unknown": ({"op": "destroy", "id": 9}, "no_bo"),
    "unbind-unknown": ({"op": "unbind_bo", "bo": 9}, "no_bo"),
    "duplicate-bo": (BO, "duplicate_bo"),
    "segment-wraps": (bo((TOP, 2)), "bad_segment"),
    "segment-of-nothing": (bo((0, 0)), "bad_segment"),
    "segments-overflow": (bo((0, TOP), (0, TOP)), "bad_segment"),
    "scattered-exbibytes": (bo(*((i << 51, 1 << 50) for i in range(5))), "too_scattered"),
    "va-wraps": (bind(va=TOP - 16383, len=32768), "wraps"),
    "length-wraps": (bind(len=TOP), "wraps"),
    "va-2-63": (bind(va=1 << 63), "outside_vm"),
    "va-0": (bind(va=0), "outside_vm"),
    "beyond-the-vm": (bind(va=(1 << 39) - 16384, len=32768), "outside_vm"),
    "offset-2-63": (bind(offset=1 << 63), "beyond_bo"),
    "offset-wraps": (bind(offset=TOP - 16383), "beyond_bo"),
    "beyond-the-bo": (bind(offset="0x40000"), "beyond_bo"),
    "unaligned-va": (bind(va="0x8001"), "misaligned"),
    "unaligned-length": (bind(len=4096), "misaligned"),
    "unaligned-offset": (bind(offset=1), "misaligned_offset"),
    "zero-length": (bind(len=0), "empty"),
    "zero-unbind": ({"op": "unbind", "va": "0x8000", "len": 0}, "empty"),
    "reserved": (bind(va="0x40000000"), "reserved"),
    "unbind-reserved": ({"op": "unbind", "va": "0x3fffc000", "len": 32768}, "reserved"),
    "write-and-execute": (bind(access="rwx"), "unsupported_access"),
    "repeat-of-0": (repeat(page=0), "bad_repeat"),
    "repeat-of-3-pages": (repeat(page=49152), "bad_repeat"),
    "repeat-2-63": (repeat(page=1 << 63), "bad_repeat"),
    "repeat-everywhere": (repeat(va=16384, len=(1 << 30) - 16384), None),
    "null-wraps": ({"op": "null", "va": "0x8000", "len": TOP}, "wraps"),
    "prefetch-outside": ({"op": "prefetch", "va": 0, "len": 16384}, "outside_vm"),
    "batch-in-a-batch": ({"op": "batch", "ops": [{"op": "batch", "ops": []}]}, "not_in_batch"),
    "bo-in-a-batch": ({"op": "batch", "ops": [BO]}, "not_in_batch"),
    "batch-of-70000": ({"op": "batch", "ops": [BIND] * 70_000}, None),
    "batch-of-262145": ({"op": "batch", "ops": [{"op": "unbind_bo", "bo": 1}] * 262_145}, "batch_too_long"),
    "batch-of-a-million": ({"op": "batch", "ops": [BIND] * 1_000_000}, "line_too_long"),
}  # fmt: skip


def text(line):
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()


def replay(dmalane, path, lines):
    path.write_bytes(b"\n".join(map(text, lines)))
    done = dmalane.run("vm", "replay", path, "--json")
    assert done.returncode in (0, 1) and "panicked" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == 1 and report["stopped"] is None
    assert (done.returncode == 0) == (report["refused"] == 0)
    return report


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line(dmalane, tmp_path, name):
    line, error = BAD_LINES[name]
    report = replay(dmalane, tmp_path / "trace.jsonl", [HEADER, BO, BIND, line, bind(va="0x10000")])
    assert [r["result"] for r in report["results"]] == ["ok", "ok", error or "ok", "ok"]
    if error:
        assert report["results"][2]["errno"].startswith("E") and report["results"][2]["message"]
        assert [(run["va"], run["len"]) for run in report["runs"]] == [("0x8000", 16384), ("0x10000", 16384)]


def test_all_of_them_at_once(dmalane, tmp_path):
    bad = [(line, error) for line, error in BAD_LINES.values() if error]
    report = replay(dmalane, tmp_path / "trace.jsonl", [HEADER, BO, BIND, *(line for line, _ in bad)])
    assert [r["result"] for r in report["results"]] == ["ok", "ok", *(error for _, error in bad)]
    assert report["refused"] == len(bad) and len(report["runs"]) == 1


def test_a_batch_that_fails_leaves_nothing(dmalane, tmp_path):
    for name, (line, error) in BAD_LINES.items():
        if not isinstance(line, dict) or line["op"] in ("bo", "destroy", "batch") or error in (None, "bad_line"):
            continue
        batch = {"op": "batch", "ops": [{"op": "unbind_bo", "bo": 1}, bind(va="0x20000"), line, bind(va="0x30000")]}
        report = replay(dmalane, tmp_path / f"{name}.jsonl", [HEADER, BO, BIND, batch])
        assert report["results"][2]["result"] == error and report["results"][2]["index"] == 2, name
        assert [(run["va"], run["offset"]) for run in report["runs"]] == [("0x8000", "0x0")], name


def test_memory_stays_bounded(dmalane, tmp_path):
    """A gigabyte without a line end, and more tables than there may be, in 1 GiB of address space."""
    huge = [{"op": "bo", "id": 7, "segments": [{"pa": "0x4000", "len": 1 << 45}]}]
    huge += [bind(bo=7, va=1 << 14, len=(1 << 30) - (1 << 14)), bind(bo=7, va=1 << 33, len=1 << 38)]
    huge += [repeat(bo=7, va=1 << 33, len=1 << 38), {"op": "null", "va": 1 << 33, "len": 1 << 38}]
    head = b"\n".join(text(line) for line in [HEADER, *huge]) + b"\n"
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))  # noqa: E731
    with subprocess.Popen(
        dmalane.command("vm", "replay", "-", "--json"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit,
    ) as child:  # fmt: skip
        child.stdin.write(head)
        for _ in range(1024):
            child.stdin.write(b"x" * (1 << 20))
        child.stdin.write(b"\n" + text({"op": "unbind_bo", "bo": 7}))
        out, err = child.communicate(timeout=120)
    assert child.returncode == 1 and b"panicked" not in err, err
    report = json.loads(out)
    names = [r["result"] for r in report["results"]]
    assert names[0] == "ok" and names[-2:] == ["line_too_long", "ok"] and "no_tables" in names, names


def test_a_recorded_load(dmalane, tmp_path):
    trace = tmp_path / "binds.jsonl"
    done = dmalane.load("--sample", "33MiB", "--record", trace)
    recorded = dmalane.run("vm", "replay", trace, "--json")
    report = json.loads(recorded.stdout)
    assert recorded.returncode == 0 and report["refused"] == 0
    runs = [(int(run["va"], 16), run["len"]) for run in report["runs"]]
    for tensor in done.json["files"][0]["tensors"]:
        if tensor["bytes"] == 0:
            continue  # bound nowhere
        at, end = tensor["device_va"], tensor["device_va"] + tensor["bytes"]
        while at < end:
            at = next(va + length for va, length in runs if va <= at < va + length)
