"""Page tables built by `dmalane iopt build`, walked by the MMUs of Unicorn and QEMU: no one here wrote those.

For longer runs: scripts/oracle.
"""

import os
import shutil

import numpy as np
import pytest

pytest.importorskip("unicorn", reason="the package unicorn could not be installed")

import iopt_oracle  # noqa: E402
from iopt_cpus import CPUS  # noqa: E402
from iopt_machines import MACHINES  # noqa: E402
from iopt_qemu import IOMMUS  # noqa: E402
from iopt_spec import Spec, random_addresses, random_spec  # noqa: E402

ADDRESSES = 12_000 if os.environ.get("DMALANE_LONG") else 4_000
BY_FORMAT = pytest.mark.parametrize("machine", [*MACHINES, *CPUS], ids=lambda m: m.format, indirect=True)


@pytest.fixture(scope="module")
def formats(dmalane):
    """The formats that the program has."""
    return iopt_oracle.formats(dmalane)


@pytest.fixture
def machine(request, formats):
    """A machine, with what the program says of its format."""
    program = getattr(request.param, "program", None)
    if program is not None and shutil.which(program) is None:
        pytest.skip(f"no {program} (Debian: apt-get install {request.param.package})")
    return request.param.of(formats)


def test_formats_without_a_machine(formats):
    """Every other format has one. QEMU has VT-d of 39 and 48 bits, and refuses a second stage of 16 KiB with 52."""
    machines = [m.format for m in [*MACHINES, *CPUS, *IOMMUS]]
    assert set(machines) <= set(formats), "a machine for a format that the program does not have"
    assert set(formats) - set(machines) == {"vtd-second-57", "arm64-s2-16k-52"}


@BY_FORMAT
def test_an_mmu_agrees(dmalane, tmp_path, machine):
    """Thousands of addresses, each read, written and fetched from."""
    count = ADDRESSES // machine.cost
    tally = iopt_oracle.compare(dmalane, machine, count, 1, tmp_path, per_image=2000)
    assert tally["addresses"] == count and tally["images"] == -(-count // 2000)
    # Not all of one kind, or there would be little to compare.
    assert tally["translated"] > tally["addresses"] // 4
    assert tally["faulted"] - tally["by permission"] > tally["addresses"] // 4
    if machine.checks:
        assert tally["by permission"] > tally["addresses"] // 20
    print(dict(tally))


@BY_FORMAT
def test_a_difference_is_found(dmalane, tmp_path, monkeypatch, machine):
    """A comparison that cannot fail would prove nothing: one mapping of the tables is not that of the specification."""
    written = Spec.json
    # Only the machine is to find it, not the checks that come before.
    for check in ["check_build", "check_dump", "check_walk"]:
        monkeypatch.setattr(iopt_oracle, check, lambda *_: None)
    falsifications = [another_place, missing] + ([another_access] if machine.checks else [])
    for falsify in falsifications:

        def falsified(self, rng):
            spec = written(self, rng)
            reached = [m for m in spec["mappings"] if machine.permits(m["access"])]
            longest = max(reached, key=lambda m: int(str(m["len"]), 0))
            falsify(machine, spec["mappings"], longest)
            return spec

        monkeypatch.setattr(Spec, "json", falsified)
        with pytest.raises(iopt_oracle.Difference, match="mapping before it"):
            iopt_oracle.compare(dmalane, machine, 2000 // machine.cost, 2, tmp_path)


def another_place(machine, _, mapping):
    pa, size = int(str(mapping["pa"]), 0), 1 << max(machine.leaves)
    mapping["pa"] = pa - size if pa >= size else pa + size


def another_access(machine, _, mapping):
    permits = lambda access: set(machine.permits(access)) & set(machine.kinds)  # noqa: E731
    mapping["access"] = next(a for a in machine.accesses if permits(a) != permits(mapping["access"]))


def missing(_, mappings, mapping):
    mappings.remove(mapping)


@BY_FORMAT
def test_an_mmu_agrees_on_foreign_tables(dmalane, tmp_path, machine):
    """Bits flipped in entries of every level: `iopt walk` must combine them as the MMU does."""
    if not machine.flips:
        pytest.skip("the MMU that stands in for this format has other rights")
    tally = iopt_oracle.compare_foreign(dmalane, machine, 1, tmp_path)
    assert tally["translated"] > tally["addresses"] // 8 and tally["by permission"] > tally["addresses"] // 20
    print(dict(tally))


@BY_FORMAT
def test_the_model_agrees_with_itself(machine):
    """Look-ups by sorted arrays, and leaves by strides, against the plainest way to say the same."""
    rng = np.random.default_rng(3)
    spec = random_spec(rng, machine, leaves=2000)
    at, _ = machine.input(random_addresses(rng, spec, machine, 300))
    mapped, to, _ = spec.lookup(at)
    for a, is_mapped, t in zip(at.tolist(), mapped, to.tolist()):
        hits = [pa + a - va for va, pa, length, _ in spec.mappings if va <= a < va + length]
        assert hits == ([t] if is_mapped else [])
    counts = dict.fromkeys(machine.leaves, 0)
    for va, pa, left, _ in spec.mappings:
        while left:
            size = max(s for s in machine.leaves if (va | pa) % (1 << s) == 0 and left >= 1 << s)
            counts[size] += 1
            va, pa, left = va + (1 << size), pa + (1 << size), left - (1 << size)
    assert spec.leaves(machine.leaves) == counts


@pytest.mark.parametrize("machine", [m for m in [*MACHINES, *CPUS] if m.signed], ids=lambda m: m.format, indirect=True)
def test_the_halves_of_a_space(machine):
    top = 1 << machine.input_bits
    at = np.array([0, top // 2 - 1, top // 2, top - 1], dtype=np.uint64)
    addresses = [0, top // 2 - 1, (1 << 64) - top // 2, (1 << 64) - 1]
    assert machine.address(at).tolist() == addresses
    input_at, taken = machine.input(np.array([*addresses, top // 2, top, 1 << 63], dtype=np.uint64))
    assert input_at.tolist() == [*at.tolist(), top // 2, 0, 0]
    assert taken.tolist() == [True] * 4 + [False] * 3


@BY_FORMAT
def test_the_specifications_are_varied(machine):
    """Every leaf size, every access, both ends of the space, neighbours and overlooked corners turn up."""
    leaves, accesses, edges, neighbours = dict.fromkeys(machine.leaves, 0), set(), set(), 0
    # A page of 1 GiB seldom fits into a space of 4 GiB.
    for seed in range(8 if machine.input_bits > 32 else 64):
        spec = random_spec(np.random.default_rng(seed), machine)
        for size, n in spec.leaves(machine.leaves).items():
            leaves[size] += n
        accesses |= set(spec.access)
        edges |= {"bottom"} if spec.va[0] == 0 else set()
        edges |= {"top"} if int(spec.va[-1]) + int(spec.len[-1]) == 1 << machine.input_bits else set()
        neighbours += int((spec.va[:-1] + spec.len[:-1] == spec.va[1:]).sum())
    assert all(leaves.values()), leaves
    assert accesses == set(machine.accesses) and edges == {"bottom", "top"} and neighbours > 10
