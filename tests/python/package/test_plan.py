"""Shares for ranks: each byte is read once, and everybody has what the plan says."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from package.models import sparse_model, write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")
plan = pytest.importorskip("dmalane.plan")

Only, Replicate, Shard = plan.Only, plan.Replicate, plan.Shard


def random_rule(chance, shape, world):
    kind = chance.randrange(5)
    if kind == 0 or not shape:
        return Replicate()
    if kind == 1:
        return Only(*chance.sample(range(world), chance.randint(1, world)))
    dim = chance.randrange(-len(shape), len(shape))
    if kind == 2:
        ranges = [sorted(chance.choices(range(shape[dim] + 1), k=2)) for _ in range(world)]
        return Shard(dim, tuple((a, b) for a, b in ranges))
    return Shard(dim)


def random_shares(chance, world):
    shares, at = [], chance.randrange(5000)
    for n in range(chance.randint(1, 30)):
        dims = chance.randrange(4)
        # Each byte is looked at by itself.
        shape = tuple(chance.choice([0, 1, 2, 3, 7, 40, 300][: 9 - dims]) for _ in range(dims))
        item, count = chance.choice([1, 2, 4, 8]), 1
        for dim in shape:
            count *= dim
        rule = random_rule(chance, shape, world)
        shares.append(plan._share(f"t{n}", shape, count * item, rule, world, at, f"file{n // 20}"))
        at += count * item
    return shares


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_each_byte_is_read_by_one_rank_and_gets_where_it_is_needed(seed, verified):
    chance = random.Random(seed)
    world = chance.choice([1, 2, 3, 4, 8])
    shares = random_shares(chance, world)
    if verified:
        shares = plan._with_readers(shares, world)
        load = [sum(share.nbytes for share in shares if share.reader == rank) for rank in range(world)]
        free = all(isinstance(share.needs[0], tuple) and len(set(share.needs)) == 1 for share in shares)
        assert not free or max(load) - min(load) <= max(share.nbytes for share in shares)
    batches = [list(plan._batches(shares, rank, world)) for rank in range(world)]
    reads = {share.name: [] for share in shares}
    for batch in (batch for of_rank in batches for batch in of_rank):
        for parts, length in ((batch.parts, batch.len), (batch.blocks, batch.scratch)):
            taken = sorted((to, to + stop - start) for _, start, stop, to in parts)
            assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:])), "parts do not overlap"
            assert not taken or taken[-1][1] <= length
            for name, start, stop, _ in parts:
                reads[name].append((start, stop))
    for share in shares:
        found = sorted(reads[share.name])
        assert all(a[1] <= b[0] for a, b in zip(found, found[1:])), "no byte is read twice"
        if verified:
            # Whole, by one rank, and not at all where nobody needs it.
            assert found == [(0, share.nbytes)] * (share.nbytes > 0 and any(map(share.bytes_of, range(world))))
        read = {byte for start, stop in found for byte in range(start, stop)}
        for rank in range(world):
            wanted = {byte for start, stop in share.runs(rank) for byte in range(start, stop)}
            assert wanted <= read
            assert len(wanted) == share.bytes_of(rank)
        if share.kind == "swap":
            for rank in range(world):
                come = [share.part(reader, rank) for reader in range(world)]
                assert sum(n * (stop - start) * share.inner for n, (start, stop) in come) == share.bytes_of(rank)


def test_rules_that_cannot_be_are_refused():
    def share(rule, shape=(4, 6)):
        return plan._share("t", shape, 24, rule, 2, 0, "f")

    outside = (((0, 1),), ((0, 5), (0, 1)), ((2, 1), (0, 1)))
    for rule in (Shard(2), Shard(-3), *(Shard(0, ranges) for ranges in outside), Only(2)):
        with pytest.raises(ValueError, match="'t'"):
            share(rule)
    with pytest.raises(ValueError):
        share(Shard(0), ())
    with pytest.raises(TypeError):
        share("rows")
    assert [share(Shard(-1)).shape_of(rank) for rank in range(2)] == [(4, 3), (4, 3)]
    assert plan.chunks(5, 4) == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_names_of_transformers():
    shapes = {
        "model.embed_tokens.weight": (100, 8), "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.q_proj.bias": (8,), "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.self_attn.o_proj.bias": (8,), "model.layers.0.mlp.down_proj.weight": (8, 6),
        "model.norm.weight": (8,), **{f"model.layers.1.mlp.experts.{e}.up_proj.weight": (6, 8) for e in range(8)},
    }  # fmt: skip
    made = plan.tensor_parallel(shapes, 4)
    kinds = [Shard(0), Shard(0), Shard(0), Shard(1), Replicate(), Replicate(), Replicate()]
    assert list(made.values()) == kinds + [Only(e // 2) for e in range(8)]
    assert plan._rules({"*.q_proj.*": Shard(0), "*": Only(1)}, shapes, 2)["model.norm.weight"] == Only(1)


RANK = """
import json, sys
import torch, torch.distributed as dist
import dmalane, dmalane.torch
from dmalane.plan import Only, Replicate, Shard, tensor_parallel
path, rank, world, store, mode, verify = *sys.argv[1:6], sys.argv[6] or None
rank, world = int(rank), int(world)
if rank == 1 and mode.endswith("-manifest"):
    verify = None if mode == "no-manifest" else "lost"
backend = "gloo"
if mode == "backend":
    # Another name, and what NCCL would refuse: tensors that are elsewhere than the plan's device, or in pieces.
    backend = "mine"
    group = lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout)
    dist.Backend.register_backend(backend, group, devices=["cpu"])
    class Strict(torch.overrides.TorchFunctionMode):
        made = moved = 0
        def __torch_function__(self, of, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if of in (torch.tensor, torch.full, torch.empty, torch.zeros, torch.ones):
                assert str(kwargs.get("device")) == "cpu", (of, args, kwargs)
                self.made += 1
            if getattr(of, "__module__", "") == "torch.distributed.distributed_c10d":
                assert all(one.is_contiguous() for one in args if isinstance(one, torch.Tensor))
                self.moved += 1
            return of(*args, **kwargs)
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
whole = dmalane.torch.load_file(path)
gpu, device = None, "cpu"
if mode.startswith("gpu "):
    sys.path.insert(0, mode.split(" ")[2])
    from package.torch_on_fake import in_a_process
    gpu, device = in_a_process(mode.split(" ")[1]), "cuda:0"
same = lambda a, b: a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous() and (
    a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)))
if mode == "other-plan":
    try:
        dmalane.torch.load_file(path, plan={"*": Only(0)} if rank else {})
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
    sys.exit()
if mode in ("broken", "killed") and rank == 1:
    import os
    from dmalane._native import Files
    import dmalane.plan
    class Broken:
        def __init__(self, *args): self.files = Files(*args)
        def __getattr__(self, name): return getattr(self.files, name)
        def read(self, *_):
            if mode == "killed":
                print("{}", flush=True)
                os._exit(0)
            raise OSError("pulled the plug")
    dmalane.plan.Files = Broken
try:
    plan = tensor_parallel if mode == "names" else {
        "big.*": Replicate(), "rows.*": Shard(0), "columns.*": Shard(1), "last.*": Shard(-1), "only.0": Only(0),
        "only.1": Only(world - 1), "pair.*": Only(0, world - 1), "odd.*": Shard(1), "F4.matrix": Shard(1),
        "overlap": Shard(0, tuple((max(0, 10 * r - 3), 10 * r + 10) for r in range(world))),
    }
    if mode == "backend":
        with Strict() as strict:
            mine = dmalane.torch.load_file(path, plan=plan, verify=verify)
        assert strict.made > 3 and strict.moved > 3, (strict.made, strict.moved)
    else:
        mine = dmalane.torch.load_file(path, device, plan=plan, verify=verify)
except (OSError, RuntimeError, ValueError, dmalane.Error) as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
report = dmalane.last_report()
for name, tensor in whole.items():
    want = tensor
    if mode == "names":
        if "q_proj" in name: want = tensor.chunk(world, 0)[rank]
        if "down_proj" in name: want = tensor.chunk(world, 1)[rank]
        if "experts" in name and int(name.split(".")[-3]) * world // 8 != rank: want = None
    elif name.startswith("rows."): want = tensor.chunk(world, 0)[rank]
    elif name.startswith(("columns.", "odd.", "F4.matrix")):
        cut = tensor.view(torch.uint8) if name.startswith("F4") else tensor
        parts = cut.chunk(world, 1)
        want = (parts[rank] if rank < len(parts) else cut[:, :0]).contiguous().view(tensor.dtype)
    elif name.startswith("last."): want = tensor.chunk(world, -1)[rank]
    elif name == "only.0": want = tensor if rank == 0 else None
    elif name == "only.1": want = tensor if rank == world - 1 else None
    elif name.startswith("pair."): want = tensor if rank in (0, world - 1) else None
    elif name == "overlap": want = tensor[max(0, 10 * rank - 3) : 10 * rank + 10]
    if want is None:
        assert name not in mine, name
    else:
        assert same(mine[name], want), (name, mine[name].shape, want.shape)
assert set(mine) <= set(whole)
files = report["files"]
done = {"read": sum(f["direct_bytes"] + f["buffered_bytes"] for f in files), "bytes": report["bytes"]}
if gpu:
    done["gpu"] = {name: count - gpu.begun[name] for name, count in gpu.counts().items()}
print(json.dumps(done))
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(path, world, tmp_path, mode, verify=""):
    store = tmp_path / f"store-{mode.split()[0]}-{world}-{bool(verify)}"
    words = [str(path), None, str(world), str(store), mode, str(verify)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, words[0], str(rank), *words[2:]],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]  # fmt: skip
    done = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(err for _, err in done)
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in done]


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    """A model in two files that has every type and shapes that the plan cuts in every way."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from package.models import random_tensors

    folder = tmp_path_factory.mktemp("plan")
    block = os.urandom(3 << 20)
    first = {name: of for name, of in random_tensors().items() if not name.startswith("F6")}
    first |= {f"rows.{i}": ("BF16", [512, 1000 + i], block[: 512 * (1000 + i) * 2]) for i in range(3)}
    first |= {f"columns.{i}": ("F32", [501, 512], block[: 501 * 512 * 4]) for i in range(3)}
    second = {f"last.{i}": ("F16", [3, 40, 64], block[: 3 * 40 * 64 * 2]) for i in range(2)}
    second |= {f"columns.wide{i}": ("U8", [4, 3 << 18], block) for i in range(2)}
    second |= {f"odd.{i}": ("U8", [7, 5], block[:35]) for i in range(3)}
    vector = ("U8", [70_001], block[:70_001])
    second |= {name: vector for name in ("only.0", "only.1", "pair.a", "overlap", "big.small")}
    second |= {"big.0": ("F32", [768, 1024], block)}
    write_model(folder / "model-00001-of-00002.safetensors", first)
    write_model(folder / "model-00002-of-00002.safetensors", second, pad=3)
    return folder


@pytest.mark.parametrize("world", [1, 2, 4])
def test_slices_are_those_of_the_whole_tensors_and_bytes_are_read_once(sharded, tmp_path, world):
    reports = run_ranks(sharded, world, tmp_path, "mapping")
    size = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in sharded.glob("*.safetensors"))
    read = sum(report["read"] for report in reports) + world * headers
    assert read <= 1.02 * size, (read, size)
    # Every rank reads a fair part.
    assert max(report["read"] for report in reports) <= 1.3 * read / world


@pytest.mark.parametrize("verified", [False, True])
def test_two_ranks_read_onto_a_gpu_each_from_registered_memory(sharded, tmp_path, driver, verified):
    """Each rank has a CUDA driver in software of its own."""
    manifest = ""
    if verified:
        manifest = tmp_path / "manifest"
        manifest.write_text(json.dumps(dmalane.manifest(sharded)))
    reports = run_ranks(sharded, 2, tmp_path, f"gpu {driver.path} {Path(__file__).parents[1]}", manifest)
    size = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    # Whole pages, of short parts too.
    assert sum(report["read"] for report in reports) <= 1.05 * size
    for report in reports:
        done = report["gpu"]
        assert done["bytes from memory that is not registered"] == 0
        # The staging buffers, and a page by which the driver is asked; and addresses, which opening a GPU reserves.
        assert 1 < done["registrations"] <= 10 and done["allocations"] == 1
        assert 0 < done["bytes that were copied"] <= report["bytes"]
    # Each byte crosses the link of one GPU, and the group hands it to the others.
    assert 0.98 * size <= sum(report["gpu"]["bytes that were copied"] for report in reports) <= size


def test_a_backend_of_another_name_does_the_same(sharded, tmp_path):
    manifest = tmp_path / "manifest"
    manifest.write_text(json.dumps(dmalane.manifest(sharded)))
    for verify in ("", manifest):
        run_ranks(sharded, 2, tmp_path, "backend", verify)


@pytest.mark.parametrize("world", [2, 4])
def test_a_plan_of_names(tmp_path, world):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    block = os.urandom(1 << 20)
    matrix = ("BF16", [512, 1024], block)
    tensors = {f"layers.{n}.self_attn.q_proj.weight": matrix for n in range(2)}
    tensors |= {f"layers.{n}.mlp.down_proj.weight": matrix for n in range(2)}
    tensors |= {f"layers.2.mlp.experts.{e}.up_proj.weight": ("U8", [8, 1000], block[e : e + 8000]) for e in range(8)}
    path = write_model(tmp_path / "model.safetensors", tensors | {"norm.weight": ("F32", [64], block[:256])})
    reports = run_ranks(path, world, tmp_path, "names")
    assert sum(report["read"] for report in reports) <= 1.02 * Path(path).stat().st_size


@pytest.mark.parametrize("world", [1, 2, 4])
def test_whole_tensors_are_compared_by_one_rank_and_slices_handed_round(sharded, tmp_path, world):
    manifest = tmp_path / "manifest"
    manifest.write_text(json.dumps(dmalane.manifest(sharded, sha256=world == 2)))
    reports = run_ranks(sharded, world, tmp_path, "mapping", manifest)
    size = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert sum(report["read"] for report in reports) <= 1.02 * size
    # The largest tensor is a tenth of it.
    assert max(report["read"] for report in reports) <= size / world + size / 5


def test_a_rank_that_reads_other_bytes_names_the_tensor(sharded, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in sharded.glob("*.safetensors"):
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = dmalane.manifest(folder)
    path = tmp_path / "manifest"
    path.write_text(json.dumps(manifest))
    for bad, file in zip(sorted(folder.glob("*.safetensors")), manifest["files"]):
        for region in file["regions"]:
            if region.get("name") not in ("columns.1", "big.0"):
                continue
            at = random.randrange(region["start"], region["end"])
            good = bad.read_bytes()
            bad.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            errors = {rank["error"] for rank in run_ranks(folder, 2, tmp_path, region["name"], path)}
            bad.write_bytes(good)
            (named,) = errors - {"another rank of the group could not read its share"}
            assert region["name"] in named and "differs" in named
    # A rank that has no manifest, and one whose manifest is not there: nobody waits for them.
    for mode, own in (("no-manifest", "other files or plans"), ("lost-manifest", "lost")):
        errors = [rank["error"] for rank in run_ranks(folder, 2, tmp_path, mode, path)]
        assert "other files or plans" in errors[0] and own in errors[1]


def test_ctrl_c_ends_a_read_and_a_wait_for_the_group(tmp_path):
    """Of one rank, while it reads a large sparse file; and of one that waits for another which never comes."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    path = sparse_model(tmp_path / "sparse.safetensors", 1 << 30)
    program = """if True:
        import sys, time
        import torch.distributed as dist
        import dmalane.torch
        rank, world = int(sys.argv[2]), int(sys.argv[3])
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}", rank=rank, world_size=world)
        print("ready", flush=True)
        try:
            while rank == 1:
                time.sleep(1)
            while True:
                dmalane.torch.load_file(sys.argv[1], plan={})
        except KeyboardInterrupt:
            print(time.clock_gettime(time.CLOCK_MONOTONIC), flush=True)
        """
    for world in (1, 2):
        ranks = [
            subprocess.Popen([sys.executable, "-c", program, path, str(rank), str(world), str(tmp_path / f"st{world}")],
                             stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]  # fmt: skip
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * world
        time.sleep(0.4)
        sent = time.clock_gettime(time.CLOCK_MONOTONIC)
        ranks[0].send_signal(signal.SIGINT)
        ended = float(ranks[0].stdout.readline())
        for rank in ranks:
            rank.kill()
            rank.communicate()
        # 200 ms on a machine with little else to do; the bound here tells apart one that waits for the group.
        assert ended - sent < 10


LIMITED = """
import hashlib, json, sys
import torch, torch.distributed as dist
import dmalane
from dmalane import plan
path, rank, world, store, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
def peak(reset=False):
    if reset:
        open("/proc/self/clear_refs", "w").write("5")
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
dist.all_reduce(torch.zeros(1))
rules = {"all.*": plan.Replicate(), "rows.*": plan.Shard(0), "columns.*": plan.Shard(1)}
before, found = peak(reset=True), {}
try:
    for name, tensor in plan.tensors(path, rules, memory_limit=limit):
        found[name] = hashlib.sha256(tensor.contiguous().numpy()).hexdigest()
except dmalane.MemoryLimitError as error:
    found = [error.wanted, error.limit, str(error)]
except RuntimeError as error:
    found = [0, 0, str(error)]
print(json.dumps([found, peak() - before]))
"""


@pytest.mark.parametrize("world", [1, 2])
def test_a_memory_limit_bounds_what_is_read_ahead_and_handed_round(tmp_path, world):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    block = os.urandom(4 << 20)
    names = [f"{kind}.{n}" for n in range(16) for kind in ("all", "rows", "columns")]
    tensors = {name: ("U8", [1024, 4096], block[n:] + block[:n]) for n, name in enumerate(names)}
    path = str(write_model(tmp_path / "model.safetensors", tensors))

    # glibc keeps what PyTorch and the backend have freed, up to 32 MiB each.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}

    def run(limit):
        ranks = [
            subprocess.Popen([sys.executable, "-c", LIMITED, path, str(rank), str(world), str(tmp_path / limit), limit],
                             stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(world)
        ]  # fmt: skip
        return [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]

    def needed(name, rank):
        rows = memoryview(tensors[name][2]).cast("B", (1024, 4096))
        first, last = rank * 4096 // world, (rank + 1) * 4096 // world
        if name.startswith("columns"):
            return b"".join(bytes(tensors[name][2][n * 4096 + first : n * 4096 + last]) for n in range(1024))
        return rows.tobytes()[first << 10 : last << 10] if name.startswith("rows") else rows.tobytes()

    # 192 MiB in all. The backend has buffers of its own, and libraries are loaded.
    for rank, (found, grown) in enumerate(run("32MiB")):
        assert found == {name: hashlib.sha256(needed(name, rank)).hexdigest() for name in names}
        assert grown < 72 << 20, grown
    for wanted, limit, message in (found for found, _ in run("4MiB")):
        assert "raise it to" in message or "another rank" in message, message
        assert not wanted or wanted > limit == 4 << 20


def test_all_ranks_fail_together(sharded, tmp_path):
    found = run_ranks(sharded, 2, tmp_path, "other-plan")
    assert all("other files or plans" in rank["error"] for rank in found)
    found = run_ranks(sharded, 2, tmp_path, "broken")
    other = "another rank of the group could not read its share"
    assert [rank["error"] for rank in found] == [other, "pulled the plug"]


def test_a_rank_that_ends_is_named_with_the_tensor(sharded, tmp_path):
    others = run_ranks(sharded, 3, tmp_path, "killed")
    del others[1]
    for rank in others:
        lost = re.match(r"the ranks could not read tensor '.+' and .* \(lost: rank 1 of the group\): ", rank["error"])
        assert lost, rank
