"""Tensors that are read when something needs them: equal to the whole ones, and no more of them read than was asked."""

import gc
import os
import random

import dmalane
import numpy as np
import pytest
from package.models import write_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from dmalane._later import Later, tensors  # noqa: E402

LAYERS, ROWS, COLUMNS = 6, 256, 1024


@pytest.fixture
def layers(tmp_path):
    """Layers that are alike, in two files: their paths, and their tensors."""
    arrays = {}
    for n in range(LAYERS):
        arrays[f"layers.{n}.q"] = np.frombuffer(os.urandom(4 * ROWS * COLUMNS), "<i4").reshape(ROWS, COLUMNS)
        arrays[f"layers.{n}.o"] = np.frombuffer(os.urandom(4 * ROWS * COLUMNS), "<i4").reshape(ROWS, COLUMNS)
        arrays[f"layers.{n}.experts"] = np.frombuffer(os.urandom(4 << 20), "<i4").reshape(4, 256, 1024)
        arrays[f"layers.{n}.norm"] = np.frombuffer(os.urandom(256), "<i4")
    names = list(arrays)
    paths = [
        write_model(tmp_path / f"{at}.safetensors", {
            name: ("I32", list(arrays[name].shape), arrays[name].tobytes()) for name in names[at::2]})
        for at in range(2)
    ]  # fmt: skip
    return paths, arrays


def opened(paths, **options):
    f = dmalane.safe_open(paths, "pt", **options)
    limit = f.report()["memory_limit"]
    return f, tensors(f._files, f._reader, f.keys(), "cpu", limit)


def begun_of(f, monkeypatch):
    """The names of the tensors whose reads are begun from now on."""
    names, real = [], type(f._reader).begin

    def begin(reader, name, *rest):
        names.append(name)
        return real(reader, name, *rest)

    monkeypatch.setattr(type(f._reader), "begin", begin)
    return names


def test_parts_are_read_and_no_more(layers):
    paths, arrays = layers
    f, stream = opened(paths)
    wanted = 0
    for name, tensor in stream:
        if name.endswith("norm"):
            assert not isinstance(tensor, Later)
            part, expected = tensor, arrays[name]
        elif name.endswith("q"):
            part, expected = tensor.narrow(0, 64, 128), arrays[name][64:192]
        elif name.endswith("o"):
            part, expected = tensor.chunk(2, dim=1)[1], arrays[name][:, 512:]
        elif name.startswith("layers.5"):
            part, expected = None, np.empty(0)
        else:
            assert isinstance(tensor, Later) and (tensor.shape, tensor.dim()) == ((4, 256, 1024), 3)
            part, expected = tensor[2].narrow(1, 0, 256), arrays[name][2][:, :256]
        if part is not None:
            assert torch.equal(part, torch.from_numpy(expected.copy())) and part.shape == expected.shape, name
        wanted += expected.nbytes
    # The last experts were begun ahead; between columns, all is read.
    assert wanted <= f.report()["bytes"] <= wanted + (9 << 20) < sum(array.nbytes for array in arrays.values()) / 2


def test_of_experts_that_are_unbound_parts_are_read(layers):
    """As vLLM takes them: one by one with a dimension that was added, or all in one tensor."""
    paths, arrays = layers
    f, stream = opened(paths)
    wanted = 0
    for name, tensor in stream:
        whole = arrays[name]
        if name.endswith("q"):
            taken, expected = [tensor.unsqueeze(0).unbind()[0].narrow(0, 64, 64)], [whole[64:128]]
        elif name.endswith("experts"):
            taken = [one.narrow(0, 32, 32) for one in tensor.chunk(2, dim=1)[1].unbind()]
            expected = [one[160:192] for one in whole]
        else:
            continue
        for one, of in zip(taken, expected, strict=True):
            assert isinstance(one, Later) and one.stride() == one.now().stride() and one.is_contiguous()
            assert torch.equal(one, torch.from_numpy(of.copy())), name
            wanted += of.nbytes
    assert wanted <= f.report()["bytes"] <= wanted + (1 << 20)


def test_of_what_is_transposed_the_whole_is_read_once(layers):
    paths, arrays = layers
    f, stream = opened(paths)
    wanted = 0
    for name, tensor in stream:
        if name.endswith("experts"):
            for part, of in zip(tensor.transpose(-1, -2).chunk(2, dim=1), np.split(arrays[name], 2, axis=2)):
                assert torch.equal(part.transpose(1, 2), torch.from_numpy(of.copy()))
            wanted += arrays[name].nbytes
    assert wanted <= f.report()["bytes"] <= wanted + (1 << 20)


def test_layers_of_another_rank_do_not_stop_what_is_read_ahead(layers, monkeypatch):
    paths, arrays = layers
    f, stream = opened(paths, memory_limit="16MiB")
    begun = begun_of(f, monkeypatch)
    ahead = 0
    for name, tensor in stream:
        ahead += name in begun
        # The first layers are asked for by nobody.
        if isinstance(tensor, Later) and int(name.split(".")[1]) >= 2:
            assert torch.equal(tensor.narrow(0, 0, 1), torch.from_numpy(arrays[name][:1].copy()))
    assert ahead > 0


def test_layers_that_are_alike_are_read_ahead(layers, monkeypatch):
    paths, arrays = layers
    f, stream = opened(paths)
    asked = begun_of(f, monkeypatch)
    before_it_came = 0
    for name, tensor in stream:
        before_it_came += name in asked
        if isinstance(tensor, Later) and not name.endswith("experts"):
            assert torch.equal(tensor.narrow(0, 8, 8), torch.from_numpy(arrays[name][8:16].copy()))
    # All but those of the first layer, and the one that follows the first "o" at once; experts are asked for by nobody.
    assert before_it_came == 2 * (LAYERS - 1) - 1 and len(asked) == 2 * LAYERS


def test_any_use_is_that_of_the_whole(layers):
    paths, arrays = layers
    chance = random.Random(3)
    _, stream = opened(paths)
    uses = [
        lambda t: t,
        lambda t: t.clone(),
        lambda t: t.t() if t.dim() == 2 else t.transpose(0, 2),
        lambda t: t.permute(*reversed(range(t.dim())))[3:5].contiguous(),
        lambda t: t.unsqueeze(-1)[..., 0].transpose(-1, 0).narrow(-1, 1, 2),
        lambda t: t.unsqueeze(1).select(1, 0).unbind(-1)[7],
        lambda t: t.unsqueeze(0)[0:1].squeeze().chunk(2)[1],
        lambda t: t.unsqueeze(0).split(1)[0].transpose(1, 2).reshape(-1)[:70],
        lambda t: t.unsqueeze(0)[:, 2:4][0:0],
        lambda t: t.to(torch.float64),
        lambda t: t.reshape(-1)[5:99],
        lambda t: t[1:3],
        lambda t: t[-1],
        lambda t: t[..., 3:70:2],
        lambda t: t[:, 10:20][3:],
        lambda t: t.data.split(100, dim=1)[-1],
        lambda t: torch.split(t, [1, 2, t.shape[0] - 3])[1],
        lambda t: torch.cat([t[:2], t[3:4]]),
        lambda t: t.narrow(1, 3, 5).contiguous() + t[0].narrow(0, 3, 1).sum(),
        lambda t: t.unsqueeze(0).expand(2, *t.shape)[1, 2:4],
        lambda t: torch.empty_like(t).copy_(t),
        lambda t: t[torch.tensor([2, 0])],
        lambda t: t[3:3],
        lambda t: t.view(torch.int16)[:4] if t.dim() == 2 else t.flatten()[7],
        lambda t: torch.zeros(t.shape, dtype=t.dtype).add_(t),
    ]
    held = []
    for name, tensor in stream:
        whole = torch.from_numpy(arrays[name].copy())
        assert (tensor.shape, tensor.dtype, tensor.numel(), tensor.device.type) == (
            whole.shape, whole.dtype, whole.numel(), "cpu")  # fmt: skip
        if whole.dim() > 1:
            for use in chance.sample(uses, 7):
                assert torch.equal(use(tensor), use(whole)), name
            held.append((tensor.narrow(0, 1, 2), whole[1:3]))
    # What was kept until the end can still be read.
    assert all(torch.equal(kept, whole) for kept, whole in held)
    _, stream = opened(paths)
    assert repr(next(stream)[1][2:]) == f"<Later: torch.int32 [{ROWS - 2}, {COLUMNS}], not read>"


def test_wrong_parts_are_refused_as_by_pytorch(layers):
    paths, _ = layers
    _, stream = opened(paths)
    _, tensor = next(stream)
    for wrong in (
        lambda: torch.select(tensor, 0, ROWS), lambda: torch.split(tensor, [1, 2]), lambda: tensor[ROWS],
        lambda: tensor.unsqueeze(4), lambda: tensor.transpose(0, 2), lambda: tensor.permute(0, 0),
        lambda: tensor.unsqueeze(0).t(), lambda: tensor.unsqueeze(0)[1], lambda: tensor.unbind(2),
        lambda: tensor[0, 0].permute(0),
    ):  # fmt: skip
        with pytest.raises((IndexError, RuntimeError)):
            wrong()
    assert [part.shape[0] for part in tensor[5:5].split(3)] == [0]


def test_the_limit_holds(layers):
    paths, arrays = layers
    f, stream = opened(paths, memory_limit="10MiB")
    for name, tensor in stream:
        copy = torch.zeros(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        assert torch.equal(copy, torch.from_numpy(arrays[name].copy()))
        del tensor
    del stream
    gc.collect()
    assert f.report()["memory_used"] == 0


@pytest.mark.parametrize("when", ["ahead", "asked"])
def test_where_a_gpu_has_no_memory_left_nothing_is_read_ahead(layers, monkeypatch, when):
    paths, arrays = layers
    f, stream = opened(paths)
    real, full, at, refused = type(f._reader).begin, [], [""], []

    def begin(reader, name, *rest):
        # While something is ahead, and for what is to be.
        if (name != at[0]) == (when == "ahead") and not full:
            refused.append(name)
            full.extend([1] if when == "asked" else [])
            raise torch.cuda.OutOfMemoryError("no memory")
        full.clear()
        return real(reader, name, *rest)

    monkeypatch.setattr(type(f._reader), "begin", begin)
    for name, tensor in stream:
        at[0] = name
        if isinstance(tensor, Later):
            assert torch.equal(tensor.narrow(0, 2, 2), torch.from_numpy(arrays[name][2:4].copy()))
    assert len(refused) > LAYERS


def test_what_cannot_be_read_is_said_when_it_is_asked_for(layers):
    paths, arrays = layers
    _, stream = opened(paths)
    first = dict(item for _, item in zip(range(3), stream))
    for path in paths:
        os.truncate(path, 4096)
    name, tensor = next((name, tensor) for name, tensor in first.items() if isinstance(tensor, Later))
    assert tensor.shape == arrays[name].shape
    with pytest.raises(dmalane.Error, match="safetensors"):
        tensor[200:].sum()
