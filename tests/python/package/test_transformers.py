"""transformers, accelerate and diffusers with their safetensors replaced, where they are installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")

import safetensors  # noqa: E402
import safetensors.torch  # noqa: E402

import dmalane.transformers  # noqa: E402

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
WORDS = torch.arange(2, 34).reshape(2, 16)


def shards(folder, count):
    """Divides the one file of a saved model into several, with their index."""
    whole = folder / "model.safetensors"
    with safetensors.safe_open(whole, "pt") as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}
    whole.unlink()
    weight_map = {}
    for n in range(count):
        name = f"model-{n + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[n::count])
        safetensors.torch.save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(params=[(name, count) for name in MODELS for count in (1, 5)], ids=lambda p: f"{p[0]}-{p[1]}")
def folder(request, tmp_path):
    """A small random model as transformers saves it, in one file or in several."""
    name, count = request.param
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    torch.manual_seed(1)
    getattr(transformers, f"{name}ForCausalLM")(config).eval().save_pretrained(tmp_path)
    if count > 1:
        shards(tmp_path, count)
    assert len(list(tmp_path.glob("*.safetensors"))) == count
    return tmp_path


def logits(folder, seed, **options):
    # Missing weights would be random, and differ.
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model(WORDS).logits


def check(folder, **options):
    """The same logits with and without the patch; all files are opened through it, and only through it."""
    theirs = logits(folder, 1, **options)
    with dmalane.transformers.patch() as patch:
        ours = logits(folder, 2, **options)
    assert torch.equal(ours, theirs) and not ours.isnan().any()
    there = {str(path) for path in Path(folder).glob("*.safetensors")}
    # Weights on the disk have files of their own, which accelerate writes.
    assert {path for path in patch.files if Path(path).parent == Path(folder)} == there, patch
    opened = len(patch.files)
    logits(folder, 3, **options)
    assert len(patch.files) == opened


def test_auto_classes_give_the_same_logits(folder):
    check(folder)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}], ids=str)
def test_device_maps(folder, device_map):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    check(folder, device_map=device_map)


def test_weights_on_the_disk(folder, tmp_path_factory):
    """Layers that accelerate reads when they are computed."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    parts = {"model.layers.2": "disk", **dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "cpu")}
    parts |= {"model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu"}
    check(folder, device_map=parts, offload_folder=str(tmp_path_factory.mktemp("offload")))


def test_variants(tmp_path):
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path, variant="fp16")
    assert (tmp_path / "model.fp16.safetensors").exists()
    with dmalane.transformers.patch() as patch:
        plain, variant = logits(tmp_path, 1), logits(tmp_path, 2, variant="fp16")
    assert [Path(path).name for path in patch.files] == ["model.safetensors", "model.fp16.safetensors"]
    assert torch.equal(variant, logits(tmp_path, 3, variant="fp16")) and torch.equal(plain * 2, variant)


def test_models_of_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(1)
    made = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 32),
        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    made.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path, variant="fp16")
    sample = torch.rand(1, 3, 8, 8)

    def output(seed, **options):
        torch.manual_seed(seed)
        model = diffusers.UNet2DModel.from_pretrained(tmp_path, **options).eval()
        with torch.no_grad():
            return model(sample, 3).sample

    theirs = output(1)
    for options in ({}, {"variant": "fp16"}, {"low_cpu_mem_usage": False}):
        with dmalane.transformers.patch() as patch:
            assert torch.equal(output(2, **options), theirs)
        variant = ".fp16" if "variant" in options else ""
        assert [Path(path).name for path in patch.files] == [f"diffusion_pytorch_model{variant}.safetensors"]


def test_a_checkpoint_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def made():
        return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))

    model = made()
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    with dmalane.transformers.patch() as patch:
        file = str(tmp_path / "model.safetensors")
        other = accelerate.load_checkpoint_and_dispatch(made(), file, device_map={"": "cpu"})
        accelerate.load_checkpoint_in_model(third := made(), str(tmp_path))
    assert {Path(path).name for path in patch.files} == {"model.safetensors"} and len(patch.files) >= 4, patch
    for one in (other, third):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), model.parameters(), strict=True))


def test_what_was_patched_is_said_and_put_back(tmp_path):
    """In a process of its own, so that modules are imported before, under and after the patch."""
    program = f"""
import sys
import safetensors, safetensors.torch
import transformers.modeling_utils
before = safetensors.safe_open, safetensors.torch.load_file
import dmalane.transformers
from dmalane.transformers import patch

def state():
    packages = ("safetensors", "transformers", "accelerate", "diffusers")
    modules = [m for n, m in sys.modules.items() if n.partition(".")[0] in packages]
    own = [(m.__name__, name, value) for m in modules for name, value in list(vars(m).items()) if callable(value)]
    return {{(module, name): value for module, name, value in own if any(value is one for one in before)}}

# A module that is imported when something is asked of it, and what is no module.
import importlib.util, types
spec = importlib.util.find_spec("this")
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules["this"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["this"])
sys.modules["odd"] = types.SimpleNamespace(__name__=None)
was = state()
first = patch()
assert type(sys.modules.pop("this")).__name__ == "_LazyModule" and sys.modules.pop("odd")
assert safetensors.safe_open is not before[0] and not state(), state()
assert set(first.places) == {{".".join(place) for place in was}}, first.places
assert "transformers.modeling_utils.safe_open" in first.places and "safetensors.torch.load_file" in repr(first)
# Again is the same, and the inner one ends nothing.
with patch() as second:
    assert second.places == [] and "within" in repr(second)
assert safetensors.safe_open is not before[0]
import accelerate.utils.modeling
assert accelerate.utils.modeling.safe_open is safetensors.safe_open
try:
    safetensors.safe_open({str(tmp_path / "bad")!r}, "pt")
except safetensors.SafetensorError as error:
    assert isinstance(error, dmalane.FormatError) and error.path, error
try:
    safetensors.safe_open({str(tmp_path / "none")!r}, "pt")
except FileNotFoundError as error:
    assert isinstance(error, dmalane.FileError)
assert first.files == []
first.undo()
first.undo()
assert (safetensors.safe_open, safetensors.torch.load_file) == before
after = state()
assert {{k: after[k] for k in was}} == was and accelerate.utils.modeling.safe_open is before[0]
assert repr(first) == "<Patch: undone; 0 files opened>", first
with patch() as third:
    assert "accelerate.utils.modeling.safe_load_file" in third.places
assert state() == after
"""
    (tmp_path / "bad").write_bytes(b"PK\x03\x04" + bytes(100))
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
