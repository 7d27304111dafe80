"""PyTorch, where it is installed."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from package.models import DTYPES  # noqa: E402

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")
pytest.importorskip("dmalane.torch")


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return a.tobytes() == bytes(b)
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and (a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))
    )


def test_every_type_is_that_of_safetensors_torch(model, tmp_path):
    from safetensors import safe_open

    path, tensors = model
    ours = dmalane.torch.load_file(path)
    with safe_open(path, framework="pt") as f:
        for name, (dtype, shape, data) in tensors.items():
            if dtype.startswith("F6_"):
                assert isinstance(ours[name], dmalane.Tensor) and ours[name].tobytes() == data
                continue
            assert same(ours[name], f.get_tensor(name)), name
    assert {t.split(".")[0] for t in tensors} == set(DTYPES)
    saved = tmp_path / "saved.safetensors"
    dmalane.torch.save_file({n: t for n, t in ours.items() if isinstance(t, torch.Tensor)}, saved)
    again = dmalane.torch.load_file(saved)
    assert all(same(tensor, ours[name]) for name, tensor in again.items())
    assert again.keys() == {name for name in tensors if not name.startswith("F6_")}


def test_tensors_own_their_memory(large):
    tensor = dmalane.torch.load_file(large)["layer.03"]
    assert tensor.is_contiguous() and float(tensor.view(torch.uint8)[0, 0]) == 3
    tensor.zero_()
    assert not tensor.any()
    shared = torch.from_dlpack(dmalane.load_file(large, framework="bytes")["layer.04"])
    assert int(shared.view(torch.uint8)[0, 0]) == 4


def test_reloading_and_lending(model, large):
    path, _ = model
    ours = dmalane.torch.load_file(path)
    tensors = {name: tensor for name, tensor in ours.items() if isinstance(tensor, torch.Tensor)}
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    places = {name: tensor.data_ptr() for name, tensor in copies.items()}
    dmalane.load_into(copies, path, strict=False)
    for name, tensor in tensors.items():
        assert same(copies[name], tensor) and copies[name].data_ptr() == places[name]
    with dmalane.safe_open(large, framework="pt", memory_limit="16MiB") as f:
        assert sum(tensor.numel() for _, tensor in f.tensors()) == 24 << 20
        assert f.get_slice("layer.00")[1:3, 4].shape == (2,)


def test_shared_memory_is_not_saved_twice(tmp_path):
    tensor = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        dmalane.torch.save_file({"a": tensor, "b": tensor}, tmp_path / "m")
    with pytest.raises(ValueError, match="contiguous"):
        dmalane.torch.save_file({"a": torch.zeros(4, 5).T}, tmp_path / "m")


def test_a_real_model_gives_the_embeddings_that_it_gives_with_safetensors(minilm):
    """And the line of the guide by which transformers takes our tensors."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from safetensors.torch import load_file

    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522,
    )  # fmt: skip
    words = torch.arange(2000, 2096).reshape(4, 24)

    def embeddings(weights, seed):
        # Missing weights would be random, and differ.
        torch.manual_seed(seed)
        model = transformers.BertModel.from_pretrained(None, config=config, state_dict=weights).eval()
        with torch.no_grad():
            return torch.nn.functional.normalize(model(words).last_hidden_state.mean(1))

    ours, theirs = dmalane.torch.load_file(minilm), load_file(minilm)
    assert ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in theirs)
    found = embeddings(ours, 1)
    assert torch.equal(found, embeddings(theirs, 2)) and torch.allclose(found.norm(dim=1), torch.ones(4))
    name = "encoder.layer.3.output.dense.weight"
    ours[name] = ours[name].flip(0)
    assert not torch.equal(found, embeddings(ours, 3)), "the embeddings depend on the weights"
