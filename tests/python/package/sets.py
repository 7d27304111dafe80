"""Random folders of models, and which tensors of them are the model, by the rules of docs/how-to/load.md."""

import json
import random
import re
import struct
from dataclasses import dataclass, field

# Stems of the files of a whole model.
WHOLE = ("model", "diffusion_pytorch_model")


@dataclass
class File:
    """A file of tensors of one float each. `split`: number from 0, parts, tensors of all parts."""

    tensors: dict[str, float]
    split: tuple[int, int, int] | None = None
    behind: bytes = b""

    def safetensors(self):
        places = ((name, [4 * i, 4 * i + 4]) for i, name in enumerate(self.tensors))
        header = {name: {"dtype": "F32", "shape": [1], "data_offsets": place} for name, place in places}
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + struct.pack(f"<{len(self.tensors)}f", *self.tensors.values())

    def gguf(self):
        def text(value):
            return struct.pack("<Q", len(value)) + value.encode()

        keys = zip(("split.no", "split.count", "split.tensors.count"), self.split or ())
        pairs = [text(key) + struct.pack("<Ii", 5, value) for key, value in keys]
        out = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(pairs)) + b"".join(pairs)
        for i, name in enumerate(self.tensors):
            out += text(name) + struct.pack("<IQIQ", 1, 1, 0, 32 * i)
        out += b"\0" * (-len(out) % 32)
        return out + b"".join(struct.pack("<f28x", value) for value in self.tensors.values()) + self.behind


@dataclass
class Folder:
    """Files by name: a `File`, the map of an index, or None for a link that leads nowhere. What a user names."""

    files: dict[str, File | dict[str, str] | None] = field(default_factory=dict)
    named: str = "."

    def write(self, folder):
        for name, what in self.files.items():
            path = folder / name
            if what is None:
                path.symlink_to("blobs/gone")
            elif isinstance(what, dict):
                path.write_text(json.dumps({"metadata": {}, "weight_map": what}))
            else:
                path.write_bytes(what.gguf() if name.endswith(".gguf") else what.safetensors())
        return folder / self.named


class Refused(Exception):
    """Why there is no model: words that each message has."""


# ---- the rules ------------------------------------------------------------------------------------------------------


def expected(folder):
    """Returns the tensors of the model, name -> (file, value). Raises Refused."""
    files, named = folder.files, folder.named
    if named != ".":
        if index_of(named):
            return by_index(folder, named)
        shard = shard_of(named)
        if named.endswith(".gguf") and shard:
            if shard[1] != 1:
                raise Refused("name the first")
            return of_files(folder, whole(folder, named, there=files))
        return of_files(folder, [named])
    index = choose_index([name for name in files if index_of(name)])
    if index:
        return by_index(folder, index)
    for ending in (".safetensors", ".gguf"):
        found = sorted(name for name in files if name.endswith(ending))
        if found:
            return of_files(folder, choose(folder, found))
    raise Refused("holds no")


def index_of(name):
    """The stem and the variant of an index."""
    match = re.fullmatch(r"(.*)\.safetensors\.index\.(?:(.+)\.)?json", name)
    return match and (match[1], match[2])


def choose_index(indices):
    plain = [name for name in indices if index_of(name)[1] is None]
    main = [name for name in plain if index_of(name)[0] in WHOLE]
    for some in (main, plain, indices if not plain else []):
        if len(some) == 1:
            return some[0]
    if indices:
        raise Refused("several indices")
    return None


def by_index(folder, index):
    listed = folder.files[index]
    if any("/" in name for name in listed.values()):
        raise Refused("not the name of a file beside it")
    missing = {name for name in listed.values() if folder.files.get(name) is None}
    if missing:
        raise Refused("not there", *missing)
    lacking = [name for name, file in listed.items() if name not in folder.files[file].tensors]
    if lacking:
        # The first file that lacks any says which.
        first = min(listed[name] for name in lacking)
        raise Refused("the index lists", *(name for name in lacking if listed[name] == first))
    return {name: (file, folder.files[file].tensors[name]) for name, file in listed.items()}


def shard_of(name):
    """Stem, number and count of a shard: `model-00001-of-00002`, a variant in front or behind."""
    stem = name.rsplit(".", 1)[0]
    match = re.fullmatch(r"(.*)-(\d+)-of-(\d+)(\.[^-]*)?", stem)
    if not match or len(match[2]) != len(match[3]) or not 1 <= int(match[2]) <= int(match[3]):
        return None
    return match[1] + (match[4] or ""), int(match[2]), int(match[3])


def whole(folder, name, there):
    """All shards of a set of which `name` is one."""
    _, number, count = shard_of(name)
    width = len(re.search(r"-(\d+)-of-", name)[1])
    front, back = name.split(f"-{number:0{width}}-of-")
    all_of_them = [f"{front}-{n:0{width}}-of-{back}" for n in range(1, count + 1)]
    missing = [name for name in all_of_them if folder.files.get(name) is None or name not in there]
    if missing:
        raise Refused("missing", *missing)
    return all_of_them


def choose(folder, found):
    """The files of one model among those of a kind."""
    groups = {}
    for name in found:
        stem, _, count = shard_of(name) or (name.rsplit(".", 1)[0], 0, 0)
        groups.setdefault((stem, count), []).append(name)
    stems = {stem for stem, _ in groups}
    has_whole = stems & set(WHOLE)

    def leave_out(rule):
        rest = {group: names for group, names in groups.items() if not rule(group[0])}
        return rest if rest and len(groups) > 1 else groups

    groups = leave_out(lambda stem: "." in stem and stem.split(".")[0] in has_whole)
    groups = leave_out(lambda stem: stem.startswith("adapter"))
    groups = leave_out(lambda stem: stem.startswith("mmproj"))
    groups = leave_out(lambda stem: has_whole and stem not in WHOLE)
    if len(groups) > 1:
        raise Refused("ranks" if all("-rank-" in stem for stem, _ in groups) else "several models")
    (names,) = groups.values()
    return whole(folder, names[0], there=names) if shard_of(names[0]) else names


def of_files(folder, names):
    files = [folder.files[name] for name in names]
    parts = {}
    for file in files:
        if file.split and file.split[1] > 1:
            parts.setdefault(file.split[1], []).append(file)
    for count, some in parts.items():
        numbers = [file.split[0] for file in some]
        if len(set(numbers)) < len(numbers):
            raise Refused("so is another file")
        if len(numbers) < count:
            raise Refused(f"split into {count} parts")
        if sum(len(file.tensors) for file in some) != some[0].split[2]:
            raise Refused("not the")
    model = {}
    for name, file in zip(names, files):
        for tensor, value in file.tensors.items():
            if tensor in model:
                raise Refused(model[tensor][0], name, tensor)
            model[tensor] = name, value
    return model


# ---- folders --------------------------------------------------------------------------------------------------------


def random_folder(seed):
    """A folder of one or more models, most of them with something odd."""
    chance = random.Random(seed)
    counter = iter(range(1, 1000))

    def file(*names, **more):
        return File({name: float(next(counter)) for name in names}, **more)

    folder = chance.choices([indexed, plain, ggufs], [4, 3, 3])[0](chance, file)
    if chance.random() < 0.15:
        folder.files["zz-notes.gguf" if chance.random() < 0.5 else "other.safetensors"] = file("other")
    there = [name for name, what in folder.files.items() if what is not None]
    if there and folder.named == "." and chance.random() < 0.1:
        folder.named = chance.choice(there)
    return folder


def names_of_shards(chance, ending, stem=None):
    stem = stem or chance.choice(["model", "model", "weights", "diffusion_pytorch_model"])
    count = chance.randint(1, 4)
    return [f"{stem}-{n:05}-of-{count:05}{ending}" for n in range(1, count + 1)]


def indexed(chance, file):
    shards = names_of_shards(chance, ".safetensors")
    files = {name: file(f"t{i}", f"u{i}") for i, name in enumerate(shards)}
    listed = {tensor: name for name, what in files.items() for tensor in what.tensors}
    stem = shards[0].split("-")[0]
    odd = chance.random()
    some = chance.choice(shards)
    if odd < 0.15:
        # A stale copy of another shard's tensor.
        files[some].tensors[chance.choice(list(listed))] = -1.0
        files[some].tensors.setdefault("unlisted", -2.0)
    elif odd < 0.25:
        files[some] = None
    elif odd < 0.35:
        del files[some]
    elif odd < 0.45:
        listed["gone"] = some
    elif odd < 0.5:
        listed[chance.choice(list(listed))] = f"../{some}"
    elif odd < 0.6:
        listed[chance.choice(list(listed))] = some
    elif odd < 0.7:
        del listed[chance.choice(list(listed))]
    elif odd < 0.8:
        files[f"{stem}.fp16.safetensors"] = file("t0")
        files[f"{stem}.safetensors.index.fp16.json"] = {"t0": f"{stem}.fp16.safetensors"}
    elif odd < 0.9:
        files["consolidated.safetensors"] = file("a", "b")
        files["consolidated.safetensors.index.json"] = {"a": "consolidated.safetensors"}
    files[f"{stem}.safetensors.index.json"] = listed
    return Folder(files)


def plain(chance, file):
    shards = names_of_shards(chance, ".safetensors") if chance.random() < 0.4 else []
    files = {name: file(f"t{i}", f"u{i}") for i, name in enumerate(shards)}
    if shards and chance.random() < 0.3:
        del files[chance.choice(shards)]
    if files and chance.random() < 0.5:
        chance.choice(list(files.values())).tensors["t0"] = -1.0
    beside = [
        "model.safetensors", "model.fp16.safetensors", "adapter_model.safetensors", "consolidated.safetensors",
        "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors", "qwen2.safetensors",
        "qwen2.5.safetensors", "diffusion_pytorch_model.safetensors",
    ]  # fmt: skip
    for name in chance.sample(beside, chance.choice([0, 1, 1, 2, 2, 3])) if files else chance.sample(beside, 2):
        files[name] = file("t0", "v")
    return Folder(files)


def ggufs(chance, file):
    names = names_of_shards(chance, ".gguf", "q-Q4_K")
    count = len(names)
    files = {name: file(f"t{i}", split=(i, count, count)) for i, name in enumerate(names)}
    odd = chance.random()
    some = chance.choice(names)
    named = "."
    if odd < 0.15:
        del files[some]
    elif odd < 0.3:
        named = some
    elif odd < 0.4:
        files = {"joined.gguf": file("t0", split=(0, 2, 2), behind=file("t1", split=(1, 2, 2)).gguf())}
    elif odd < 0.5:
        files[some].split = (0, count, count)
    elif odd < 0.6:
        files[some].split = (files[some].split[0], count, count + 1)
    elif odd < 0.7:
        files[some].tensors["t0"] = -1.0
    if chance.random() < 0.3:
        files["mmproj-q.gguf"] = file("projector")
    if chance.random() < 0.15:
        files["q-Q8_0.gguf"] = file("t0")
    return Folder(files, named)
