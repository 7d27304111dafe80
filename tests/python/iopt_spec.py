"""Random lists of mappings for `dmalane iopt build`, and what they say of an address: the slow, obvious model."""

import numpy as np

# Leaves of one list, so that its tables stay small and lists many.
MOST_LEAVES = 20_000


class Spec:
    """Mappings (va, pa, len, access) that do not overlap."""

    def __init__(self, mappings):
        self.mappings = sorted(mappings)
        column = lambda i: np.array([m[i] for m in self.mappings], dtype=np.uint64)  # noqa: E731
        self.va, self.pa, self.len = column(0), column(1), column(2)
        self.access = np.array([m[3] for m in self.mappings])

    def json(self, rng):
        """As the program reads it, in any order, with numbers in any of the ways it takes."""
        forms = [int, hex, str]
        mappings = [
            {"va": forms[rng.integers(3)](va), "pa": forms[rng.integers(3)](pa), "len": forms[rng.integers(3)](len_),
             "access": access}
            for va, pa, len_, access in self.mappings
        ]  # fmt: skip
        return {"schema": 1, "mappings": [mappings[i] for i in rng.permutation(len(mappings))]}

    def lookup(self, at):
        """For an array of addresses: whether each is mapped, where it leads, and by which mapping."""
        which = np.searchsorted(self.va, at, side="right") - 1
        none = which < 0
        which = np.where(none, 0, which)
        mapped = ~none & (at - self.va[which] < self.len[which])
        return mapped, self.pa[which] + (at - self.va[which]), which

    def leaves(self, sizes):
        """Leaves by size (logarithms), each as large as alignment and the rest of its mapping allow."""
        counts = dict.fromkeys(sizes, 0)
        for va, pa, left, _ in self.mappings:
            while left:
                size = max(s for s in sizes if (va | pa) % (1 << s) == 0 and left >> s)
                # All leaves of this size up to where a larger one may start.
                larger = [s for s in sizes if s > size]
                n = left >> size
                if larger and (va ^ pa) % (1 << larger[0]) == 0:
                    n = min(n, (-va % (1 << larger[0])) >> size or n)
                if larger and not va % (1 << larger[0]) and not pa % (1 << larger[0]):
                    n = left >> size  # aligned, but too short for the larger one
                counts[size] += n
                va, pa, left = va + (n << size), pa + (n << size), left - (n << size)
        return counts


def random_spec(rng, machine, leaves=MOST_LEAVES):
    """Mappings of every size, scattered and in clusters, at odd places and at both ends of the space."""
    granule, sizes = machine.leaves[0], machine.leaves
    space, (out_first, out_end) = 1 << machine.input_bits, machine.outputs
    taken, mappings = [], []
    # Where things gather: many tables are shared by neighbours, and the ends of the space are always among them.
    centres = [0, space - 1, space // 2] + [int(rng.integers(space)) for _ in range(4)]
    for _ in range(int(rng.integers(20, 120))):
        page = 1 << int(rng.choice(sizes))
        length = page * int(rng.integers(1, 5)) if rng.random() < 0.6 else (1 << granule) * int(rng.integers(1, 600))
        if rng.random() < 0.2:
            length += (1 << granule) * int(rng.integers(1, 4))  # a block with a tail
        length = min(length, space)
        near = centres[rng.integers(len(centres))]
        reach = 1 << int(rng.integers(granule + 2, machine.input_bits))
        va = near + int(rng.integers(-reach, reach)) if rng.random() < 0.7 else int(rng.integers(space))
        align = page if rng.random() < 0.7 else 1 << granule
        va = va // align * align
        edge = rng.random()
        if mappings and edge < 0.25:
            m = mappings[rng.integers(len(mappings))]  # right behind or right before another
            va = m[0] + m[2] if rng.random() < 0.5 else m[0] - length
        elif edge < 0.30:
            va = 0
        elif edge < 0.35:
            va = space - length
        if va < 0 or va + length > space or any(va < end and start < va + length for start, end in taken):
            continue
        # As far from alignment with the input as chance will have it; sometimes where the last one went on.
        pa = int(rng.integers(out_first, out_end)) >> granule << granule
        if rng.random() < 0.7:
            page = 1 << int(rng.choice(sizes))
            pa = pa // page * page + va % page
        if mappings and rng.random() < 0.1:
            pa = mappings[-1][1] + mappings[-1][2]
        if rng.random() < 0.1:
            pa = out_end - length
        if pa < out_first or pa + length > out_end:
            continue
        access = str(rng.choice(machine.accesses))
        cost = sum(Spec([(va, pa, length, access)]).leaves(sizes).values())
        if cost > leaves:
            continue
        leaves -= cost
        taken.append((va, va + length))
        mappings.append((va, pa, length, access))
    return Spec(mappings)


def random_addresses(rng, spec, machine, count):
    """Addresses as the machine takes them: inside mappings, at the edges of these and of their leaves, between them,
    and beyond the space."""
    granule, space = np.uint64(1 << machine.leaves[0]), 1 << machine.input_bits
    kind = rng.choice(6, size=count, p=[0.35, 0.25, 0.15, 0.1, 0.12, 0.03])
    which = rng.integers(len(spec.mappings), size=count)
    start, length = spec.va[which], spec.len[which]
    inside = start + rng.integers(0, length, dtype=np.uint64)
    small = rng.integers(0, 9, size=count, dtype=np.uint64) - np.uint64(4)  # wraps, and wraps back
    end = np.where(rng.integers(2, size=count) == 1, start, start + length)
    leaf = np.uint64(1) << rng.choice(np.array(machine.leaves, dtype=np.uint64), size=count)
    offset = rng.integers(0, granule, size=count, dtype=np.uint64)
    near = end + (rng.integers(0, 65, size=count, dtype=np.uint64) - np.uint64(32)) * granule + offset
    anywhere = rng.integers(0, space, size=count, dtype=np.uint64)
    at = np.select(
        [kind == 1, kind == 2, kind == 3, kind == 4],
        [end + small, inside // leaf * leaf + small, near, anywhere],
        default=inside,
    )
    # Addresses past either end of the space come back at the other.
    at = machine.address(at & np.uint64(space - 1))
    # A mapped address with one more bit set, or one less.
    if machine.input_bits < machine.address_bits:
        bit = rng.integers(machine.input_bits, machine.address_bits, size=count, dtype=np.uint64)
        at = np.where(kind == 5, at ^ (np.uint64(1) << bit), at)
    return at
