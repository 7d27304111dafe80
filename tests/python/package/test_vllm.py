"""`--load-format dmalane` in vLLM where it is installed, and the plugin beside a stub of what it uses of vLLM."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from package.models import write_model

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")


def test_the_wheel_names_the_plugin():
    (entry,) = (e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "dmalane")
    assert entry.value == "dmalane.vllm:register"
    assert callable(entry.load())


class Source:
    """As `DefaultModelLoader.Source`."""

    def __init__(self, folder):
        self.model_or_path, self.prefix = folder, "model."
        self.subfolder = self.revision = self.allow_patterns_overrides = self.is_unused_weight = None
        self.fall_back_to_pt = True


@pytest.fixture
def stub(monkeypatch):
    return stub_of_vllm(monkeypatch)


def stub_of_vllm(monkeypatch):
    """The names of vLLM that the plugin uses."""
    from dataclasses import dataclass, field

    @dataclass
    class LoadConfig:
        load_format: str = "dmalane"
        model_loader_extra_config: dict = field(default_factory=dict)
        safetensors_load_strategy: str | None = None
        use_tqdm_on_load: bool = True

    class DefaultModelLoader:
        def __init__(self, load_config):
            assert load_config.load_format == "safetensors", "the parent knows no other format"
            if load_config.model_loader_extra_config:
                raise ValueError(f"unexpected {load_config.model_loader_extra_config}")
            self.load_config, self.counter_before_loading_weights = load_config, 0.0
            self.local_expert_ids = self._encoder_only_lm_prefixes = None

        def _prepare_weights(self, folder, *_):
            files = sorted(map(str, Path(folder).glob("*.safetensors")), reverse=True)
            return folder, files, bool(files), "index"

        def _get_weights_iterator(self, source):
            return "the parent's"

    modules = {name: types.ModuleType(name) for name in (
        "vllm", "vllm.model_executor", "vllm.model_executor.model_loader",
        "vllm.model_executor.model_loader.default_loader", "vllm.model_executor.model_loader.ep_weight_filter",
        "vllm.model_executor.model_loader.weight_utils", "vllm.distributed", "tqdm", "tqdm.auto",
    )}  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, module)
    loader = modules["vllm.model_executor.model_loader"]
    loader._LOAD_FORMAT_TO_MODEL_LOADER = {}
    loader.register_model_loader = lambda name: lambda of: loader._LOAD_FORMAT_TO_MODEL_LOADER.setdefault(name, of)
    loader.LoadConfig = LoadConfig
    import time

    default = modules["vllm.model_executor.model_loader.default_loader"]
    default.DefaultModelLoader, default.time = DefaultModelLoader, time
    modules["vllm.model_executor.model_loader.ep_weight_filter"].should_skip_weight = (
        lambda name, ids: ids is not None and ".experts." in name and int(name.split(".")[-1]) not in ids
    )
    modules["vllm.model_executor.model_loader.weight_utils"].enable_tqdm = lambda use: use
    loader.group = types.SimpleNamespace(world_size=1, device_group=None, device="cpu")
    modules["vllm.distributed"].get_tp_group = modules["vllm.distributed"].get_pp_group = lambda: loader.group
    loader.bars = []
    modules["tqdm.auto"].tqdm = lambda it, **options: loader.bars.append(options) or it
    monkeypatch.setattr("dmalane._lend.converter", lambda framework: lambda tensor: tensor)
    return loader


def test_the_plugin_beside_a_stub(stub, tmp_path):
    from dmalane import vllm

    vllm.register()
    registered = stub._LOAD_FORMAT_TO_MODEL_LOADER["dmalane"]
    vllm.register()
    assert stub._LOAD_FORMAT_TO_MODEL_LOADER == {"dmalane": registered}
    first = {f"a.experts.{i}": ("U8", [5], bytes([i] * 5)) for i in range(4)}
    write_model(tmp_path / "model-1-of-2.safetensors", first)
    second = write_model(tmp_path / "model-2-of-2.safetensors", {"b": ("U8", [3], b"abc")})
    loader = registered(stub.LoadConfig())
    read = {name: t.tobytes() for name, t in loader._get_weights_iterator(Source(tmp_path))}
    assert read == {"model." + name: data for name, (_, _, data) in first.items()} | {"model.b": b"abc"}
    assert loader.counter_before_loading_weights > 0 and not stub.bars[0]["disable"] and stub.bars[0]["total"] == 5
    # Experts of other ranks are not read.
    loader.local_expert_ids = {1, 2}
    assert [name for name, _ in loader._get_weights_iterator(Source(tmp_path))] == [
        "model.a.experts.1", "model.a.experts.2", "model.b"]  # fmt: skip
    manifest = tmp_path / "manifest"
    manifest.write_text(json.dumps(dmalane.manifest(tmp_path)))
    options = {"verify": str(manifest), "memory_limit": "1MiB", "direct": False}
    quiet = registered(stub.LoadConfig(model_loader_extra_config=options, use_tqdm_on_load=False))
    assert len(dict(quiet._get_weights_iterator(Source(tmp_path)))) == 5 and stub.bars[-1]["disable"]
    data = second.read_bytes()
    second.write_bytes(data[:-1] + b"x")
    with pytest.raises(dmalane.IntegrityError) as error:
        dict(quiet._get_weights_iterator(Source(tmp_path)))
    assert error.value.tensor == "b"
    with pytest.raises(ValueError, match="num_threads"):
        registered(stub.LoadConfig(model_loader_extra_config={"num_threads": 3}))
    # Other formats, and those that vLLM has to put together, go its own way.
    empty = tmp_path / "empty"
    empty.mkdir()
    assert loader._get_weights_iterator(Source(empty)) == "the parent's"
    assembled = registered(stub.LoadConfig(safetensors_load_strategy="torchao"))
    assert assembled._get_weights_iterator(Source(tmp_path)) == "the parent's"


def test_ranks_read_what_their_parameters_take(stub, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from dmalane import vllm
    from dmalane._frameworks import converter

    monkeypatch.setattr("dmalane._lend.converter", converter)
    rows = os.urandom(4 << 20)
    write_model(tmp_path / "m.safetensors", {f"layers.{n}.w": ("U8", [4096, 1024], rows) for n in range(4)})
    vllm.register()
    stub.group.world_size = 2
    loader = stub._LOAD_FORMAT_TO_MODEL_LOADER["dmalane"](stub.LoadConfig())
    for name, tensor in loader._get_weights_iterator(Source(tmp_path)):
        part = torch.empty(100, 1024, dtype=torch.uint8).copy_(tensor.narrow(0, 7, 100))
        assert bytes(part.flatten().numpy()) == rows[7 << 10 : 107 << 10], name
    assert dmalane.last_report()["bytes"] == 4 * 100 << 10


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_on_a_gpu_are_read_onto_it(stub, tmp_path, monkeypatch, driver, ranks):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from dmalane import _onto, vllm
    from dmalane._frameworks import converter
    from package.torch_on_fake import OnFake

    monkeypatch.setattr("dmalane._lend.converter", converter)
    gpu = OnFake(torch, driver, monkeypatch)
    rows = os.urandom(4 << 20)
    write_model(tmp_path / "m.safetensors", {f"layers.{n}.w": ("U8", [4096, 1024], rows) for n in range(4)})
    vllm.register()
    stub.group.world_size = ranks
    registered = stub._LOAD_FORMAT_TO_MODEL_LOADER["dmalane"]
    there = torch.device("cuda", 0)

    class Model:
        def parameters(self):
            return iter([types.SimpleNamespace(device=there)])

    def load_weights(loader, model, config):
        for name, tensor in loader._get_weights_iterator(Source(tmp_path)):
            assert ranks == 1 or tensor.device == there
            part = tensor.narrow(0, 7, 100).narrow(1, 100, 900).clone()
            assert bytes(part.flatten().numpy()) == b"".join(rows[n << 10 :][100:1000] for n in range(7, 107)), name

    monkeypatch.setattr(registered.__bases__[0], "load_weights", load_weights, raising=False)
    registered(stub.LoadConfig()).load_weights(Model(), None)
    # Of rows a part of which is wanted, all is read.
    assert gpu.copied() == 4 * (len(rows) if ranks == 1 else 100 << 10)
    _onto.Gpu.let_go()


RANK_ON_FAKE = """
import json, sys, types
sys.path.insert(0, sys.argv[1])
import pytest, torch, torch.distributed as dist
from package.test_vllm import Source, stub_of_vllm
from package.torch_on_fake import in_a_process
gpu, rank, folder = in_a_process(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[5]}", rank=rank, world_size=2)
patch = pytest.MonkeyPatch()
stub = stub_of_vllm(patch)
stub.group.world_size, stub.group.device, stub.group.device_group = 2, torch.device("cuda", 0), dist.group.WORLD
from dmalane import vllm
from dmalane._frameworks import converter
patch.setattr("dmalane._lend.converter", converter)
vllm.register()
registered = stub._LOAD_FORMAT_TO_MODEL_LOADER["dmalane"]

class Model:
    def parameters(self):
        return iter([types.SimpleNamespace(device=torch.device("cuda", 0))])

def load_weights(loader, model, config):
    for name, tensor in loader._get_weights_iterator(Source(folder)):
        assert bytes(tensor.flatten().numpy()) == bytes([int(name.split(".")[-2])]) * (1 << 20), name

registered.__bases__[0].load_weights = load_weights
registered(stub.LoadConfig(model_loader_extra_config={"distributed": True})).load_weights(Model(), None)
print(json.dumps({name: count - gpu.begun[name] for name, count in gpu.counts().items()}))
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_share_the_reads_onto_their_gpus(tmp_path, driver):
    """With `distributed`; each rank has a CUDA driver in software of its own."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    tensors = {f"layers.{n}.w": ("U8", [1024, 1024], bytes([n]) * (1 << 20)) for n in range(8)}
    write_model(tmp_path / "m.safetensors", tensors)
    words = [str(Path(__file__).parents[1]), str(driver.path)], [str(tmp_path), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK_ON_FAKE, *words[0], str(rank), *words[1]],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    done = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(err for _, err in done)
    counts = [json.loads(out.strip().splitlines()[-1]) for out, _ in done]
    assert sum(count["bytes that were copied"] for count in counts) == 8 << 20, "each byte crosses one link"
    for count in counts:
        assert count["bytes from memory that is not registered"] == 0 < count["bytes that were copied"]
        assert 1 < count["registrations"] <= 10


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["xpu", "cuda"])
def test_parameters_on_other_devices_come_from_pinned_memory(stub, tmp_path, monkeypatch, kind, ranks):
    """XPU, and ROCm, which PyTorch calls "cuda"."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from dmalane import _onto, vllm
    from dmalane._frameworks import converter
    from package.torch_on_fake import OnOther

    monkeypatch.setattr("dmalane._lend.converter", converter)
    monkeypatch.setattr(_onto.Pinned, "_open", {})
    other = OnOther(torch, monkeypatch, kind)
    rows = os.urandom(1 << 20)
    write_model(tmp_path / "m.safetensors", {f"layers.{n}.w": ("U8", [1024, 1024], rows) for n in range(4)})
    vllm.register()
    registered = stub._LOAD_FORMAT_TO_MODEL_LOADER["dmalane"]
    stub.group.world_size = ranks
    there = torch.device(kind, 0)
    model = types.SimpleNamespace(parameters=lambda: iter([types.SimpleNamespace(device=there)]))

    def load_weights(loader, model, config):
        for name, tensor in loader._get_weights_iterator(Source(tmp_path)):
            assert ranks == 1 or tensor.device == there
            assert bytes(tensor.narrow(0, 7, 512).clone().flatten().numpy()) == rows[7 << 10 : 519 << 10], name

    monkeypatch.setattr(registered.__bases__[0], "load_weights", load_weights, raising=False)
    registered(stub.LoadConfig()).load_weights(model, None)
    assert other.bytes == {True: (4 << 20) // ranks, False: 0}


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_copy_what_is_kept_on_their_gpu(stub, tmp_path, monkeypatch, driver, keeper, ranks):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from dmalane import _onto, vllm
    from package.torch_on_fake import OnFake

    gpu, there = OnFake(torch, driver, monkeypatch), torch.device("cuda", 0)
    rows = os.urandom(4 << 20)
    folder = tmp_path / "m"
    folder.mkdir()
    write_model(folder / "model.safetensors", {"layers.0.w": ("U8", [4096, 1024], rows)})
    index = {"weight_map": {"layers.0.w": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    vllm.register()
    stub.group.world_size = ranks
    loader = stub._LOAD_FORMAT_TO_MODEL_LOADER["dmalane"](stub.LoadConfig(model_loader_extra_config={"keep": True}))
    loader._device = there
    program = driver.path.with_name("dmalane")

    def kept():
        listed = subprocess.run([program, "kept", "--json"], capture_output=True, check=True)
        return [("device" in model, model["attaches"]) for model in json.loads(listed.stdout)["models"]]

    # Whole: the parts of them that parameters take.
    name, tensor = next(iter(loader._get_weights_iterator(Source(folder))))
    assert name == "model.layers.0.w" and kept() == [(False, 1)], "without one on the GPU it is kept in host memory"
    subprocess.run([program, "keep", folder, "-d", f"cuda:0,lib={driver.path}", "-q"], check=True, capture_output=True)
    before = gpu.copied()
    ((name, tensor),) = loader._get_weights_iterator(Source(folder))
    assert name == "model.layers.0.w" and bytes(tensor.flatten().numpy()) == rows
    assert gpu.copied() == before and sorted(kept()) == [(False, 1), (True, 1)]
    del tensor
    _onto.Gpu.let_go()


RANK = """
import os, pathlib, sys, torch, dmalane
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

def load(path, load_format, extra):
    args = EngineArgs(model=path, load_format=load_format, skip_tokenizer_init=True, enforce_eager=True,
                      dtype="bfloat16", max_model_len=64, tensor_parallel_size=world, model_loader_extra_config=extra)
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")
            initialize_model_parallel(world)
        return {name: p.detach().clone() for name, p in get_model(vllm_config=config).named_parameters()}

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for path in sys.argv[4:]:
    theirs = load(path, "safetensors", {})
    for extra in ({}, {"distributed": True}, {"memory_limit": "64MiB"}):
        ours = load(path, "dmalane", extra)
        assert ours.keys() == theirs.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
        # Of what is split by rows each rank reads its part; parts of columns with what lies between them.
        size = sum(file.stat().st_size for file in pathlib.Path(path).glob("*.safetensors"))
        part = dmalane.last_report()["bytes"] / size
        assert part < 1.1 / world if extra.get("distributed") else world == 1 or part < 0.85, part
        print("EQUAL", len(ours), flush=True)
"""


@pytest.mark.parametrize(("model", "world"), [("llama", 1), ("llama", 2), ("mixtral", 2)])
def test_parameters_are_those_of_the_default_loader(request, tmp_path, model, world):
    folder = request.getfixturevalue(model)
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
        "VLLM_DIST_IDENT": f"dmalane-{os.getpid()}-{model}-{world}",
    }  # fmt: skip
    words = [str(world), str(tmp_path / "store"), str(folder / "single"), str(folder / "sharded")]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *words], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]  # fmt: skip
    done = [rank.communicate(timeout=2400) for rank in ranks]
    for rank, (out, err) in zip(ranks, done):
        assert rank.returncode == 0 and out.count("EQUAL") == 6, out[-4000:] + err[-8000:]
    assert "by dmalane" in done[0][1], "the bar of use_tqdm_on_load"


ENGINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, load_format, ranks, extra = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    llm = LLM(model, load_format=load_format, tensor_parallel_size=ranks, model_loader_extra_config=extra,
              skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=4, dtype="bfloat16",
              use_tqdm_on_load=True, distributed_executor_backend="mp" if ranks > 1 else None)
    prompts = [{"prompt_token_ids": [7 * n % 250 + k for k in range(1, 6)]} for n in range(4)]
    params = SamplingParams(max_tokens=12, temperature=0, detokenize=False, logprobs=3, ignore_eos=True)
    out = [[o.outputs[0].token_ids, [sorted((t, l.logprob) for t, l in step.items()) for step in o.outputs[0].logprobs]]
           for o in llm.generate(prompts, params, use_tqdm=False)]
    print("RESULT " + json.dumps(out))
"""


def saved(folder, kind, **options):
    """A tiny model of random weights, in one file and in several."""
    torch = pytest.importorskip("torch", reason="vLLM is not installed")
    transformers = pytest.importorskip("transformers", reason="vLLM is not installed")
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128, **options,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="600KB")
    assert len(list((folder / "sharded").glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama"), "Llama")


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("mixtral"), "Mixtral", num_local_experts=4)


def engine(script, model, load_format, ranks=1, one_process=True, extra=None):
    """Runs vLLM in a process of its own; returns the tokens with their probabilities, and its log."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not one_process)), "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        # Or it refuses more ranks than the machine has nodes of memory.
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    words = [sys.executable, script, model, load_format, str(ranks), json.dumps(extra or {})]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=2400, check=False)
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and result, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(result[0].removeprefix("RESULT ")), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "ranks", "one_process", "extra"),
    [
        ("single", 1, True, {}),
        ("sharded", 1, False, {"memory_limit": "1GiB"}),
        ("sharded", 2, False, {}),
        ("sharded", 2, False, {"distributed": True}),
    ],
)
def test_outputs_are_those_of_the_default_loader(llama, tmp_path, kind, ranks, one_process, extra):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    theirs, _ = engine(script, llama / kind, "safetensors", ranks, one_process)
    ours, log = engine(script, llama / kind, "dmalane", ranks, one_process, extra)
    assert ours == theirs
    assert "by dmalane" in log, "the bar of use_tqdm_on_load"


def test_a_second_start_attaches_to_what_the_first_one_kept(llama, tmp_path, keeper):
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    theirs, _ = engine(script, llama / "sharded", "safetensors")
    for attaches in (1, 2):
        ours, log = engine(script, llama / "sharded", "dmalane", extra={"keep": True})
        assert ours == theirs
        print([line for line in log.splitlines() if "oading weights took" in line])
        listed = subprocess.run([os.environ["DMALANE_BIN"], "kept", "--json"], capture_output=True, check=True)
        (model,) = json.loads(listed.stdout)["models"]
        assert (model["name"], model["attaches"]) == ("sharded", attaches)
