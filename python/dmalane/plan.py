"""A share for each rank of a torch.distributed group: each byte is read by one rank, and the group hands it round.

A plan says what each rank needs of each tensor: `{"*.q_proj.weight": Shard(0), "*.experts.3.*": Only(1)}`. The first
pattern that fits counts; a tensor that fits none is needed by all ranks. A plan can also be a function of the tensors'
shapes and the number of ranks, such as `tensor_parallel`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from ._arguments import Manifest, Paths, manifest_of, parse_size, paths_of
from ._frameworks import pytorch, torch_type
from ._last import remember
from ._native import Files
from ._onto import Gpu, moved
from .errors import MemoryLimitError

_PAGE = 4096
# Bytes of tensors that are read and handed round together, at most, except for a larger one; and files, which take
# descriptors while they are read.
_BATCH, _FILES = 256 << 20, 32
# Shorter runs of bytes are not read where they are: somebody reads all that lies between them too.
_RUN = 128 << 10

Range = tuple[int, int]


@dataclass(frozen=True)
class Replicate:
    """All ranks need the whole tensor."""


@dataclass(frozen=True)
class Only:
    """These ranks need the whole tensor, and the others nothing of it."""

    ranks: tuple[int, ...]

    def __init__(self, *ranks: int) -> None:
        object.__setattr__(self, "ranks", ranks)


@dataclass(frozen=True)
class Shard:
    """Each rank needs a range of dimension `dim`: 0 for rows, 1 for columns of a matrix.

    By default those of `torch.chunk` (and DTensor): equal ones, the last ranks with less where it does not divide.
    `ranges` has one `(start, stop)` for each rank; they may overlap, and leave something out.
    """

    dim: int = 0
    ranges: tuple[Range, ...] | None = None


Rule = Replicate | Only | Shard
Plan = Mapping[str, Rule] | Callable[[dict[str, tuple[int, ...]], int], Mapping[str, Rule]]

_ROWS = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3|fc1)\.|(^|\.)(embed_tokens|lm_head)\.")
_COLUMNS = re.compile(r"\.(o_proj|down_proj|w2|fc2)\.weight$")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")


def tensor_parallel(shapes: Mapping[str, tuple[int, ...]], world: int) -> dict[str, Rule]:
    """A plan by the names that models of transformers use: projections into heads and hidden layers, embeddings and
    the output layer by rows, projections back by columns, numbered experts whole, in consecutive blocks of them.
    Everything else, and what `world` does not divide, is needed by all ranks."""
    experts: dict[str, int] = {}
    for name in shapes:
        if found := _EXPERT.match(name):
            experts[found[1]] = max(experts.get(found[1], 0), int(found[2]) + 1)
    plan: dict[str, Rule] = {}
    for name, shape in shapes.items():
        found, dim = _EXPERT.match(name), 1 if _COLUMNS.search(name) else 0 if _ROWS.search(name) else None
        if found:
            plan[name] = Only(int(found[2]) * world // experts[found[1]])
        elif dim is not None and dim < len(shape) and shape[dim] % world == 0:
            plan[name] = Shard(dim)
        else:
            plan[name] = Replicate()
    return plan


def chunks(size: int, world: int) -> list[Range]:
    """The ranges of `torch.chunk`, one for each rank."""
    step = -(-size // world)
    return [(min(rank * step, size), min((rank + 1) * step, size)) for rank in range(world)]


@dataclass(frozen=True)
class _Share:
    """Each rank's part of a tensor, seen as `outer` times `size` times `inner` bytes: ranges of the middle one."""

    name: str
    shape: tuple[int, ...]
    dim: int
    needs: tuple[Range | None, ...]
    at: int
    path: str
    nbytes: int
    # The rank that reads all of it, to compare it with a manifest.
    reader: int | None = None

    @property
    def outer(self) -> int:
        return math.prod(self.shape[: self.dim])

    @property
    def size(self) -> int:
        return self.shape[self.dim] if self.shape else 1

    @property
    def inner(self) -> int:
        return self.nbytes // max(1, self.outer * self.size)

    @property
    def kind(self) -> str:
        """ "all": everybody needs everything, and reads a part. "own": each reads what it needs. "swap": the ranks read
        equal blocks of it, or one reads all of it, and they exchange them. "give": one reads what everybody needs."""
        whole = (0, self.size)
        if all(need == whole for need in self.needs):
            return "all" if self.reader is None else "give"
        if self.reader is not None:
            users = [rank for rank, need in enumerate(self.needs) if need and need[0] < need[1]]
            alone = users == [self.reader] and self.needs[self.reader] == whole
            return "own" if alone or not users else "swap"
        ranges = sorted(need for need in self.needs if need and need[0] < need[1])
        disjoint = all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:]))
        long = self.outer == 1 or all((stop - start) * self.inner >= _RUN for start, stop in ranges)
        return "own" if disjoint and long else "swap"

    def bytes_of(self, rank: int) -> int:
        """Bytes that a rank needs."""
        start, stop = self.needs[rank] or (0, 0)
        return self.outer * (stop - start) * self.inner

    def shape_of(self, rank: int) -> tuple[int, ...] | None:
        """The shape of what a rank needs."""
        need = self.needs[rank]
        if need is None or not self.shape:
            return None if need is None else ()
        return (*self.shape[: self.dim], need[1] - need[0], *self.shape[self.dim + 1 :])

    def runs(self, rank: int) -> list[Range]:
        """The runs of bytes that a rank needs."""
        start, stop = self.needs[rank] or (0, 0)
        step = self.size * self.inner
        if (start, stop) == (0, self.size):
            return [(0, self.nbytes)]
        return [(n * step + start * self.inner, n * step + stop * self.inner) for n in range(self.outer)]

    def block(self, rank: int) -> tuple[Range, Range]:
        """The block that a rank reads of a tensor to be exchanged: a range of the outer dimension and of this one."""
        if self.reader is not None:
            return (0, self.outer if rank == self.reader else 0), (0, self.size)
        if self.outer > 1:
            return chunks(self.outer, len(self.needs))[rank], (0, self.size)
        return (0, 1), chunks(self.size, len(self.needs))[rank]

    def part(self, reader: int, rank: int) -> tuple[int, Range]:
        """The part of a block that a rank needs from its reader: how many of the outer dimension, and which range."""
        (first, last), (low, high) = self.block(reader)
        start, stop = self.needs[rank] or (0, 0)
        start, stop = max(start, low), min(stop, high)
        return last - first, (start, max(start, stop))


def _share(name: str, shape: tuple[int, ...], nbytes: int, rule: Rule, world: int, at: int, path: str) -> _Share:
    dim, size = 0, shape[0] if shape else 1
    needs: tuple[Range | None, ...]
    if isinstance(rule, Replicate):
        needs = ((0, size),) * world
    elif isinstance(rule, Only):
        if not all(0 <= rank < world for rank in rule.ranks):
            raise ValueError(f"tensor {name!r}: {rule} names a rank that is not among the {world} of the group")
        needs = tuple((0, size) if rank in rule.ranks else None for rank in range(world))
    elif isinstance(rule, Shard):
        if not -len(shape) <= rule.dim < len(shape):
            raise ValueError(f"tensor {name!r} of shape {list(shape)} has no dimension {rule.dim}")
        dim = rule.dim % len(shape)
        size = shape[dim]
        needs = tuple(chunks(size, world) if rule.ranges is None else rule.ranges)
        if len(needs) != world or not all(need and 0 <= need[0] <= need[1] <= size for need in needs):
            raise ValueError(f"tensor {name!r}: {rule} is not a range within {size} for each of {world} ranks")
    else:
        raise TypeError(f"tensor {name!r}: {rule!r} is none of Replicate, Only and Shard")
    return _Share(name, shape, dim, needs, at, path, nbytes)


def _with_readers(shares: list[_Share], world: int) -> list[_Share]:
    """Each tensor read by one rank: the one with the least to read so far, of those that need all of it if there are
    any."""
    load, found = [0] * world, []
    for share in shares:
        whole = [rank for rank in range(world) if share.needs[rank] == (0, share.size)]
        reader = min(whole or range(world), key=lambda rank: load[rank])
        load[reader] += share.nbytes
        found.append(replace(share, reader=reader))
    return found


def _rules(plan: Plan, shapes: dict[str, tuple[int, ...]], world: int) -> dict[str, Rule]:
    patterns = plan(shapes, world) if callable(plan) else plan
    # Exact names first: a plan of a function has one for each tensor.
    globs = [(pattern, rule) for pattern, rule in patterns.items() if pattern not in shapes]

    def of(name: str) -> Rule:
        if name in patterns:
            return patterns[name]
        return next((rule for pattern, rule in globs if fnmatch.fnmatchcase(name, pattern)), Replicate())

    return {name: of(name) for name in shapes}


class _Batch:
    """Tensors that are read and handed round together: where everything lies in this rank's memory.

    First comes what all ranks need, which has the same layout on all of them: each reads an equal span of it. Then
    what this rank reads for itself, and room for what comes in exchange. `parts` are read there; `blocks` are what
    this rank reads of the tensors to be exchanged, into memory of their own.
    """

    def __init__(self, shares: list[_Share], rank: int, world: int) -> None:
        self.shares, self.rank = shares, rank
        self.places: dict[str, int] = {}
        self.parts: list[tuple[str, int, int, int]] = []
        self.blocks: list[tuple[str, int, int, int]] = []
        self.block_places: dict[str, int] = {}
        at, common = 0, [share for share in shares if share.kind == "all"]
        for share in common:
            self.places[share.name] = at = _place(at, share.at, share.shape, share.nbytes)
            at += share.nbytes
        self.span = -(-at // (world * _PAGE)) * _PAGE
        low, high = rank * self.span, (rank + 1) * self.span
        for share in common:
            place = self.places[share.name]
            start, stop = max(place, low), min(place + share.nbytes, high)
            if start < stop:
                self.parts.append((share.name, start - place, stop - place, start))
        at, scratch = world * self.span, 0
        for share in shares:
            kind = share.kind
            if kind == "all":
                continue
            runs = share.runs(rank) if kind == "own" or (kind, rank) == ("give", share.reader) else []
            self.places[share.name] = at = _place(at, share.at + (runs[0][0] if runs else 0), share.shape, share.nbytes)
            for start, stop in runs:
                if start < stop:
                    self.parts.append((share.name, start, stop, at))
                at += stop - start
            if not runs:
                at += share.bytes_of(rank)
            if kind == "swap":
                (first, last), (low, high) = share.block(rank)
                start = (first * share.size + low) * share.inner
                stop = start + (last - first) * (high - low) * share.inner
                if start < stop:
                    scratch = _place(scratch, share.at + start, (), 1)
                self.block_places[share.name] = scratch
                if start < stop:
                    self.blocks.append((share.name, start, stop, scratch))
                scratch += stop - start
        self.len, self.scratch = at, scratch
        self.exchanged = max([self.span if common else 0, *(2 * sum(self.sent(share)) for share in self._swapped())])

    @property
    def most(self) -> int:
        """The memory that it takes at most, until its last tensor was handed out."""
        return self.len + self.scratch + self.exchanged

    def _swapped(self) -> list[_Share]:
        return [share for share in self.shares if share.name in self.block_places]

    def sent(self, share: _Share) -> list[int]:
        """Bytes of this rank's block of a tensor to be exchanged that each rank needs."""
        parts = [share.part(self.rank, other) for other in range(len(share.needs))]
        return [count * (stop - start) * share.inner for count, (start, stop) in parts]

    def begin(self, pool: ThreadPoolExecutor, files: Files, device: Any) -> Future[tuple[Any, Any]]:
        """Begins to read this rank's share, and what it reads for an exchange: bytes on the device."""
        import torch

        wanted = [(self.parts, self.len)] + ([(self.blocks, self.scratch)] if self.scratch else [])
        try:
            gpu = Gpu.of(torch.device(device))
            memories = gpu.empty([(torch.uint8, (length,)) for _, length in wanted]) if gpu else []
        except Exception as error:  # noqa: BLE001: the others must hear of it, as of one while reading
            failed: Future[tuple[Any, Any]] = Future()
            failed.set_exception(error)
            return failed

        def read() -> tuple[Any, Any]:
            if gpu is not None:
                for memory, (parts, _) in zip(memories, wanted):
                    at = memory.data_ptr()
                    gpu.read(files, [(name, start, stop, at + to) for name, start, stop, to in parts], [memory])
                come = memories
            else:
                come = [torch.frombuffer(files.read(*one), dtype=torch.uint8) for one in wanted]
                come = [moved(one, torch.device(device)) for one in come]
            return come[0], come[1] if self.scratch else None

        return pool.submit(read)


def _place(at: int, in_file: int, shape: tuple[int, ...], nbytes: int) -> int:
    """The next place for bytes: as in the file, so that direct I/O puts them there, or else at a cache line."""
    element = nbytes // max(1, math.prod(shape)) or 1
    return at + (in_file - at) % _PAGE if in_file % element == 0 else -(-at // 64) * 64


def _batches(shares: list[_Share], rank: int, world: int, most: int = _BATCH) -> Iterator[_Batch]:
    batch: list[_Share] = []
    for share in shares:
        size, paths = sum(one.nbytes for one in batch), {one.path for one in batch} | {share.path}
        if batch and (size + share.nbytes > most or len(paths) > _FILES):
            yield _Batch(batch, rank, world)
            batch = []
        batch.append(share)
    if batch:
        yield _Batch(batch, rank, world)


def tensors(
    filename: Paths,
    plan: Plan,
    group: Any = None,
    *,
    device: Any = "cpu",
    names: Iterable[str] | None = None,
    direct: bool | None = None,
    verify: Manifest | None = None,
    memory_limit: int | str | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yields what this rank needs of the tensors of files, with their names, in the order of the bytes.

    All ranks of `group` (by default of all processes) call it with the same files and the same plan, and take
    everything: each reads its share once, and the group's backend moves what others need. `device` is one that the
    backend works with ("cuda" for NCCL). `names` are those of the tensors to read. If a rank fails, all do.

    With `verify`, a manifest, each tensor that is needed is read whole by one rank, which compares it as it arrives and
    before anybody has a part of it; `IntegrityError` names the first one that differs, on the rank that read it. Slices
    that ranks would otherwise read for themselves go through the group then.

    `memory_limit`, the same for all ranks, bounds the memory of what is read ahead and handed round, with the tensors
    that were handed out last: not what the backend takes, or the caller keeps. A tensor that does not fit is a
    `MemoryLimitError`.
    """
    torch = pytorch()
    import torch.distributed as dist

    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group")
    types: dict[str, Any] = {}
    shares: list[_Share] = []
    failure: Exception | None = None
    try:
        limit = parse_size(memory_limit)
        files = Files(paths_of(filename), None, direct, manifest_of(verify))
        types, shares = _shares(files, plan, world, None if names is None else set(names))
    except Exception as error:  # noqa: BLE001: the others must hear of it, whatever it is
        failure = error
    if verify is not None:
        shares = _with_readers(shares, world)
    about = [(s.name, s.shape, s.dim, s.needs, s.at, s.nbytes, s.reader, types[s.name]) for s in shares]
    seen = repr((about, memory_limit))
    digest = int.from_bytes(hashlib.sha256(seen.encode()).digest()[:7], "little") if failure is None else -1 - rank
    # Made where they are: nothing is copied to a GPU from memory that is not registered.
    seen_by_all = torch.cat([torch.full((1,), one, device=device) for one in (digest, -digest)])
    together = _Group(group, world, rank)
    together.do("compare the files", dist.all_reduce, seen_by_all, dist.ReduceOp.MAX)
    if failure is not None:
        raise failure
    if seen_by_all[0] != -seen_by_all[1]:
        raise ValueError("the ranks have other files or plans, or one of them could not open its files")
    # Closed first, which ends a read that nobody waits for any more.
    with ThreadPoolExecutor(1, thread_name_prefix="dmalane-plan") as pool, closing(files):
        batches = _batches(shares, rank, world, min(_BATCH, _BATCH if limit is None else limit // 4))

        def begin(batch: _Batch, beside: int) -> Future[tuple[Any, Any]]:
            if limit is None or beside + batch.most <= limit:
                return batch.begin(pool, files, device)
            message = (
                f"{batch.most} bytes to read tensor {batch.shares[0].name!r} and to hand it round are wanted, but "
                f"{beside} of the memory limit of {limit} are in use: raise it to {beside + batch.most}"
            )
            failed: Future[tuple[Any, Any]] = Future()
            failed.set_exception(MemoryLimitError(message, wanted=batch.most, limit=limit))
            return failed

        batch, before = next(batches, None), 0
        ahead = batch and begin(batch, 0)
        while batch is not None:
            memory = None
            try:
                memory = ahead.result()
            except Exception as error:  # noqa: BLE001: the others must hear of it, whatever it is
                failure = error
            failed = torch.full((1,), int(failure is not None), device=device)
            first = repr(batch.shares[0].name)
            together.do(f"read tensor {first} and those behind it", dist.all_reduce, failed, dist.ReduceOp.MAX)
            if failure is not None:
                raise failure
            if failed.item():
                raise RuntimeError("another rank of the group could not read its share")
            following = next(batches, None)
            # The caller may still have the last tensor of the batch before.
            beside = before + batch.most
            fits = following and (limit is None or beside + following.most <= limit)
            ahead = begin(following, beside) if following and fits else None
            yield from _exchange(batch, memory, types, together, device)
            before, batch, memory = batch.len, following, None
            if batch is not None and ahead is None:
                ahead = begin(batch, before)
    remember(files.report)


def _shares(
    files: Files, plan: Plan, world: int, names: set[str] | None
) -> tuple[dict[str, Any], list[_Share]]:
    """PyTorch's types of the tensors, and what each rank needs of them."""
    types, shapes, described = {}, {}, {}
    for name in files.keys():
        if names is not None and name not in names:
            continue
        dtype, shape, nbytes, path, at = files.describe(name)
        kind = torch_type(dtype, shape)
        if kind is None:
            raise TypeError(f"tensor {name!r}: PyTorch has no type {dtype!r} that could be handed round")
        types[name], shapes[name] = kind
        described[name] = nbytes, path, at
    rules = _rules(plan, shapes, world)
    return types, [
        _share(name, shapes[name], nbytes, rules[name], world, at, path)
        for name, (nbytes, path, at) in described.items()
    ]


class _Group:
    """The ranks, and what they do together."""

    def __init__(self, group: Any, world: int, rank: int) -> None:
        self.group, self.world, self.rank = group, world, rank

    def do(self, what: str, collective: Callable[..., Any], *args: Any) -> None:
        """Runs a collective operation to its end. The backends' own waiting does not notice Ctrl-C, and their own
        errors name an address at most."""
        try:
            _wait(collective(*args, group=self.group, async_op=True))
        except RuntimeError as error:
            gone = ", ".join(str(rank) for rank in self._gone())
            why = f" (lost: rank {gone} of the group)" if gone else ""
            raise RuntimeError(f"the ranks could not {what}{why}: {error}") from error

    def _gone(self) -> list[int]:
        """The ranks that ended, as far as the backend tells: Gloo refuses at once to send to one."""
        import torch
        import torch.distributed as dist

        gone: list[int] = []
        for other in range(self.world if "gloo" in dist.get_backend(self.group) else 0):
            try:
                if other != self.rank:
                    to = dist.get_global_rank(self.group or dist.group.WORLD, other)
                    _wait(dist.isend(torch.zeros(1), to, group=self.group), 0.1)
            except RuntimeError:
                gone.append(other)
        return gone


def _wait(work: Any, seconds: float = math.inf) -> None:
    """Waits for an operation to end, or for so long."""
    began = time.monotonic()
    while not work.is_completed():
        if (waited := time.monotonic() - began) > seconds:
            return
        time.sleep(min(0.01, waited / 10))
    work.wait()


def _exchange(
    batch: _Batch, memory: tuple[Any, Any], types: dict[str, Any], together: _Group, device: Any
) -> Iterator[tuple[str, Any]]:
    import torch
    import torch.distributed as dist

    flat, blocks = memory
    rank, world, first = batch.rank, together.world, repr(batch.shares[0].name)
    if batch.span:
        common = flat[: world * batch.span]
        # The name since PyTorch 2.13, and before.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        mine = common[rank * batch.span :][: batch.span].clone()
        together.do(f"hand round tensor {first} and those behind it", gather, common, mine)
        del mine
    for share in batch.shares:
        at, size = batch.places[share.name], share.bytes_of(rank)
        if share.name in batch.block_places and share.nbytes:
            outer, (low, high) = share.block(rank)[0], share.block(rank)[1]
            if blocks is None:
                blocks = torch.empty(0, dtype=torch.uint8, device=device)
            block = blocks[batch.block_places[share.name] :][: (outer[1] - outer[0]) * (high - low) * share.inner]
            block = block.view(outer[1] - outer[0], high - low, share.inner)
            ranges = [share.part(rank, other)[1] for other in range(world)]
            sent = [block[:, max(a - low, 0) : max(b - low, 0)].reshape(-1) for a, b in ranges]
            come = [share.part(other, rank) for other in range(world)]
            come_bytes = [count * (stop - start) * share.inner for count, (start, stop) in come]
            into, sent_all = flat[at : at + size], torch.cat(sent)
            exchange = dist.all_to_all_single
            together.do(f"hand round tensor {share.name!r}", exchange, into, sent_all, come_bytes, batch.sent(share))
            del sent, sent_all
        if share.kind == "give" and share.nbytes:
            reader = dist.get_global_rank(together.group or dist.group.WORLD, share.reader)
            together.do(f"hand round tensor {share.name!r}", dist.broadcast, flat[at : at + size], reader)
        if (shape := share.shape_of(rank)) is not None:
            part = flat[at : at + size] if size else torch.empty(0, dtype=torch.uint8, device=device)
            yield share.name, part.view(types[share.name]).view(shape)


__all__ = ["Only", "Replicate", "Shard", "chunks", "tensor_parallel", "tensors"]
