"""vLLM's `--load-format dmalane`: the entry point of `vllm.general_plugins`, which vLLM loads in all its processes."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_OPTIONS = ("direct", "distributed", "keep", "memory_limit", "verify")


def register() -> None:
    """Registers the loader. vLLM may call it more than once in a process."""
    from vllm.model_executor import model_loader

    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get("dmalane") is None:
        model_loader.register_model_loader("dmalane")(_loader())


def _loader() -> type:
    """The class, which derives from one of vLLM."""
    import dataclasses

    from tqdm.auto import tqdm
    from vllm.model_executor.model_loader import default_loader
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
    from vllm.model_executor.model_loader.weight_utils import enable_tqdm

    from ._arguments import parse_size
    from ._last import remember
    from ._lend import safe_open
    from ._load import kept_on_gpu
    from ._native import DeviceTensor
    from ._onto import Gpu, Pinned

    class DmalaneModelLoader(default_loader.DefaultModelLoader):
        """Finds files and filters tensors as vLLM's own loader does, and reads them into memory that is no mapping of
        a file; of several ranks each reads what its parameters take. `model_loader_extra_config` takes `memory_limit`,
        `direct`, `keep` and `verify` of `dmalane.safe_open`, and `distributed`: each rank of the tensor parallel group
        reads an equal share, and the group hands it round."""

        def __init__(self, load_config: Any) -> None:
            extra = dict(load_config.model_loader_extra_config or {})
            self._options = {key: extra.pop(key) for key in _OPTIONS if key in extra}
            # The parent's way to find files, and its check of the other options, are those of safetensors.
            config = dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config=extra)
            super().__init__(config)
            self._device: Any = "cpu"

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> Any:
            # Parameters on a GPU copy what comes next to them: nothing crosses the link unregistered.
            first = next(model.parameters(), None)
            there = first is not None and (Gpu.of(first.device) or Pinned.of(first.device))
            self._device = first.device if there else "cpu"
            return super().load_weights(model, model_config)

        def _get_weights_iterator(self, source: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
            found = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            folder, files, is_safetensors, index = found
            if not is_safetensors or self.load_config.safetensors_load_strategy == "torchao":
                return super()._get_weights_iterator(source)
            if self._encoder_only_lm_prefixes is not None:
                files = default_loader.filter_mm_encoder_only_safetensors_files(
                    files,
                    folder,
                    index,
                    self._encoder_only_lm_prefixes,
                    weights_mapper=self._encoder_only_weights_mapper,
                )
            if source.is_unused_weight is not None:
                files = default_loader.filter_safetensors_files_by_weight_name(files, source.is_unused_weight)
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = default_loader.time.perf_counter()
            return ((source.prefix + name, tensor) for name, tensor in self._read(sorted(files)))

        def _read(self, files: list[str]) -> Generator[tuple[str, torch.Tensor], None, None]:
            from vllm.distributed import get_pp_group, get_tp_group

            options = dict(self._options)
            shared = options.pop("distributed", False)
            keeps = options.get("keep") and self._device != "cpu" and not shared
            on_gpu = kept_on_gpu(files, self._device, options.get("verify")) if keeps else None
            f = None if on_gpu else safe_open(files, "pt", self._device, **options)
            names = [name for name in on_gpu or f if not should_skip_weight(name, self.local_expert_ids)]
            if shared and self.local_expert_ids is not None:
                raise ValueError("distributed cannot be used with expert parallelism: ranks want different tensors")
            if on_gpu:
                # A model may keep a tensor, or change it. Types that PyTorch lacks are no tensors of it.
                def own(tensor: Any) -> Any:
                    return tensor if isinstance(tensor, DeviceTensor) else tensor.clone()

                tensors = ((name, own(on_gpu[name])) for name in names)
            elif shared:
                from . import plan

                if options.pop("keep", False):
                    raise ValueError("distributed cannot be used together with keep")
                tp = get_tp_group()
                tensors = plan.tensors(files, {}, tp.device_group, device=tp.device, names=names, **options)
            elif get_tp_group().world_size * get_pp_group().world_size > 1 and options.get("verify") is None:
                from . import _later

                # Parameters take parts of them, maybe after the last one was handed out: the files stay open.
                limit = parse_size(options.get("memory_limit"))
                tensors = _later.tensors(f._files, f._reader, names, self._device, limit)
            else:
                tensors = f.tensors(names)
            if f is not None:
                remember(f._files.report)
            yield from tqdm(
                tensors,
                total=len(names),
                desc=f"Loading {len(files)} files by dmalane",
                unit="tensors",
                disable=not enable_tqdm(self.load_config.use_tqdm_on_load),
            )

    return DmalaneModelLoader
