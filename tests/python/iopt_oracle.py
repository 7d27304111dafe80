"""Compares what Unicorn's MMUs make of images built by `dmalane iopt build` with what the specifications say."""

import json
import zlib
from collections import Counter
from functools import partial

import numpy as np
from iopt_machines import KINDS
from iopt_spec import random_addresses, random_spec

# Addresses that `iopt walk` is asked for too, of each image.
WALKS = 200


class Difference(AssertionError):
    """The machine and the specification do not agree."""


def compare(dmalane, machine, count, seed, directory, per_image=250_000):
    """Compares `count` addresses, each read, written and fetched from. Gives what was counted."""
    tally = Counter()
    image = 0
    while tally["addresses"] < count:
        n = min(per_image, count - tally["addresses"])
        rng = np.random.default_rng([seed, image, zlib.crc32(machine.format.encode())])
        tally += compare_image(dmalane, machine, rng, n, f"{machine.format}, seed {seed}, image {image}", directory)
        image += 1
    return tally


def compare_image(dmalane, machine, rng, count, name, directory):
    spec = random_spec(rng, machine)
    base = machine.table_base(rng)
    built, image = build(dmalane, machine, spec, rng, base, directory)
    check_build(machine, spec, built, image, base, name)
    check_dump(dmalane, machine, spec, built, name)

    at = random_addresses(rng, spec, machine, count)
    input_at, taken = machine.input(at)
    mapped, to, which = spec.lookup(input_at)
    mapped &= taken
    check_walk(dmalane, machine, spec, built, input_at[:WALKS], name)

    registers = {r["name"]: int(r["value"], 16) for r in built["registers"]}
    tally = Counter({"images": 1, "addresses": count, "leaves": sum(leaf["count"] for leaf in built["leaves"])})
    permits = np.array([[k in machine.permits(a) for k in KINDS] for a in spec.access])
    with machine.walker(registers, base, image, directory) as walker:
        # The kinds in a random order: an earlier one may leave something in the TLB.
        for letter in rng.permutation(machine.kinds):
            refused, answers = walker.translate(letter, at)
            allowed = mapped & permits[which, list(KINDS).index(letter)]
            wrong = (refused == allowed) | (allowed & (answers != to))
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                m = spec.mappings[which[i]]
                raise Difference(
                    f"{name}: {letter} at {at[i]:#x}: {said(refused[i], answers[i])}, expected "
                    f"{said(not allowed[i], to[i])}; "
                    f"{int(wrong.sum())} differ; mapping before it: {m[0]:#x} -> {m[1]:#x} {m[2]:#x} {m[3]}"
                )
            tally["translated"] += int(allowed.sum())
            tally["faulted"] += int(count - allowed.sum())
            tally["by permission"] += int((mapped & ~allowed).sum())
    return tally


def said(refused, to):
    return "refused" if refused else f"-> {to:#x}"


def disagree(refused, to, translation, allowed):
    """True where the MMU says something else than `iopt walk` of one access."""
    return bool(refused) == allowed or allowed and int(to) != int(translation["pa"], 16)


def compare_foreign(dmalane, machine, seed, directory, images=4, count=500):
    """Compares `iopt walk` with the MMU on images in which bits of random entries were flipped, so that tables limit
    what is below them and pages are for privileged accesses. Gives what was counted."""
    tally = Counter()
    for image in range(images):
        rng = np.random.default_rng([seed, image, zlib.crc32(machine.format.encode())])
        spec = random_spec(rng, machine, leaves=2000)
        base = machine.table_base(rng)
        built, data = build(dmalane, machine, spec, rng, base, directory)
        entries = np.frombuffer(data, f"u{machine.entry_bytes}").copy()
        # The first entries of an image are the root's: flip many of the upper levels, and some of all.
        used = np.flatnonzero(entries)
        chosen = np.concatenate([used[: 1 + len(used) // 50], rng.choice(used, size=1 + len(used) // 4)])
        for i in chosen[rng.random(len(chosen)) < 0.7]:
            entries[i] ^= entries.dtype.type(1 << int(rng.choice(machine.flips)))
        (directory / "image.bin").write_bytes(entries.tobytes())

        at = random_addresses(rng, spec, machine, count)
        input_at, taken = machine.input(at)
        at, input_at = at[taken], input_at[taken]
        options = ["--format", machine.format, "--root", built["root"]] + ([] if machine.privileged else ["--user"])
        walked = run(dmalane, "walk", built["image"], *options, *map(hex, input_at.tolist()))["translations"]
        registers = {r["name"]: int(r["value"], 16) for r in built["registers"]}
        # A machine has no memory where such tables would be.
        asked = [i for i, t in enumerate(walked) if not (t["fault"] and t["fault"]["kind"] == "bad_table")]
        at, walked = at[asked], [walked[i] for i in asked]
        tally["addresses"] += len(at)
        tally["by permission"] += sum(not (t["access"] or "").startswith("rwx") for t in walked)
        start = partial(machine.walker, registers, base, entries.tobytes(), directory)
        with start() as walker:
            # Unicorn executes what is not readable in stage 2.
            for letter in sorted(set(machine.kinds) - ({"x"} if "-s2-" in machine.format else set())):
                refused, answers = walker.translate(letter, at)
                for i, (no, to, t) in enumerate(zip(refused, answers.tolist(), walked, strict=True)):
                    allowed = t["access"] is not None and letter in t["access"].split(",")[0]
                    if disagree(no, to, t, allowed):
                        # Unicorn 2.1.4 once gave an address itself as the answer, and did not when asked again.
                        with start() as second:
                            (no,), (to,) = second.translate(letter, at[i : i + 1])
                        tally["asked twice"] += 1
                    if disagree(no, to, t, allowed):
                        raise Difference(
                            f"{machine.format}, seed {seed}, image {image}: {letter} at {int(at[i]):#x}: "
                            f"{said(no, int(to))}, but iopt walk says {t}"
                        )
                    tally["translated"] += allowed
    return tally


def build(dmalane, machine, spec, rng, base, directory):
    spec_file, image_file = directory / "spec.json", directory / "image.bin"
    spec_file.write_text(json.dumps(spec.json(rng)))
    options = ["--force", "--format", machine.format, "--base", hex(base)]
    built = run(dmalane, "build", spec_file, "-o", image_file, *options)
    return built, image_file.read_bytes()


def check_build(machine, spec, built, image, base, name):
    """The summary is right, and the leaves are as large as they can be."""
    assert built["bytes"] == len(image) and int(built["root"], 16) == base, name
    assert built["mapped_bytes"] == sum(m[2] for m in spec.mappings), name
    expected = {1 << size: n for size, n in spec.leaves(machine.leaves).items() if n}
    found = {leaf["page_bytes"]: leaf["count"] for leaf in built["leaves"] if leaf["count"]}
    if found != expected:
        raise Difference(f"{name}: leaves are {found}, the specification gives {expected}")


def check_walk(dmalane, machine, spec, built, at, name):
    """`iopt walk` must agree as well, and so must the words of its JSON."""
    image = (built["image"], "--format", machine.format, "--root", built["root"])
    walked = run(dmalane, "walk", *image, *map(hex, at.tolist()))["translations"]
    mapped, to, which = spec.lookup(at)
    for t, mapped, to, which in zip(walked, mapped, to, which, strict=True):
        expected = (hex(to), spec.access[which]) if mapped else (None, None)
        if (t["pa"], t["access"] and t["access"].replace("-", "")) != expected:
            raise Difference(f"{name}: iopt walk says {t}, expected {expected}")


def check_dump(dmalane, machine, spec, built, name):
    """Every run of `iopt dump` lies within a mapping, and together they are as long."""
    runs = run(dmalane, "dump", built["image"], "--format", machine.format, "--root", built["root"])["runs"]
    start = np.array([int(r["va"], 16) for r in runs], dtype=np.uint64)
    length = np.array([r["len"] for r in runs], dtype=np.uint64)
    first, last = spec.lookup(start), spec.lookup(start + length - np.uint64(1))
    for i, r in enumerate(runs):
        whole = first[0][i] and last[0][i] and int(r["pa"], 16) == first[1][i]
        whole = whole and last[1][i] - first[1][i] == length[i] - np.uint64(1)
        if not whole or any(spec.access[w[2][i]] != r["access"].replace("-", "") for w in (first, last)):
            raise Difference(f"{name}: iopt dump says {r}")
    assert (start[1:] >= start[:-1] + length[:-1]).all(), f"{name}: runs out of order"
    assert sum(r["len"] for r in runs) == built["mapped_bytes"], name


def run(dmalane, *args):
    done = dmalane.run("iopt", *args, "--json")
    assert done.returncode == 0, f"{args[0]}: exit status {done.returncode}\n{done.stderr}"
    return json.loads(done.stdout)


def formats(dmalane):
    """The formats that the program reports, by name."""
    return {said["format"]: said for said in run(dmalane, "formats")["formats"]}
