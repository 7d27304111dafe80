"""safetensors replaced by dmalane where transformers, accelerate and diffusers read weights.

    import dmalane.transformers

    dmalane.transformers.patch()            # until the process ends, or undo()
    with dmalane.transformers.patch():      # or only here
        model = AutoModelForCausalLM.from_pretrained(folder)
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Self, get_args

import safetensors
import safetensors.torch

from ._arguments import Backend, Path, path_of
from ._frameworks import Framework
from ._lend import safe_open
from .torch import load_file

# Whose modules have names of safetensors in their own.
PACKAGES = ("safetensors", "transformers", "accelerate", "diffusers", "peft")

_lock = threading.Lock()
_active: Patch | None = None


class Patch:
    """What is replaced, until `undo()` or the end of a `with`."""

    def __init__(self, within: Patch | None) -> None:
        self._within = within
        # The names that this patch has replaced, each with its module; none where another one was active already.
        self.places: list[str] = _replace(_REPLACEMENTS) if within is None else []
        # The files that were opened through the patch, in that order.
        self.files: list[str] = [] if within is None else within.files

    def undo(self) -> None:
        """Puts back everything, also in modules that were imported meanwhile. Nothing where another patch is active."""
        global _active
        with _lock:
            if _active is not self:
                return
            _replace({new: old for old, new in _REPLACEMENTS.items()})
            _active = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        if self._within is not None:
            return f"<Patch within {self._within!r}>"
        state = ", ".join(self.places) if _active is self else "undone"
        return f"<Patch: {state}; {len(self.files)} files opened>"


def patch() -> Patch:
    """Replaces `safetensors.safe_open` and `safetensors.torch.load_file` by those of dmalane, in safetensors itself and
    in all modules of transformers, accelerate, diffusers and peft that have imported them. Called again, it changes
    nothing. Saving, and files that are no safetensors, stay as they are."""
    global _active
    with _lock:
        if _active is not None:
            return Patch(_active)
        _active = Patch(None)
        return _active


def _replace(by: dict[Any, Any]) -> list[str]:
    """Replaces objects wherever a module of the packages has them; returns the names."""
    replaced = []
    for name, module in list(sys.modules.items()):
        # By its name there: to ask a module for its own imports one that is lazy, and may be odd in other ways.
        if module is None or name.partition(".")[0] not in PACKAGES:
            continue
        # Without attributes that a lazy module would import.
        for attribute, value in list(vars(module).items()):
            if callable(value) and any(value is old for old in by):
                setattr(module, attribute, by[value])
                replaced.append(f"{module.__name__}.{attribute}")
    return sorted(replaced)


class _SafeOpen(safe_open):
    """The one that others get. Frameworks that dmalane does not have are left to safetensors."""

    def __new__(cls, filename: Path, framework: str, *args: Any, **options: Any) -> Any:
        ours = framework in get_args(Framework)
        return super().__new__(cls) if ours else _THEIRS(filename, framework, *args, **options)

    def __init__(
        self, filename: Path, framework: Framework, device: str | int | Any = "cpu", *, backend: Backend = "mmap"
    ) -> None:
        super().__init__(filename, framework, device, backend=backend)
        _opened(filename)


def _load_file(filename: Path, device: str | int | Any = "cpu", *, backend: Backend = "mmap") -> dict[str, Any]:
    loaded = load_file(filename, device, backend=backend)
    _opened(filename)
    return loaded


def _opened(filename: Path) -> None:
    if _active is not None:
        _active.files.append(path_of(filename))


_THEIRS = safetensors.safe_open
_REPLACEMENTS: dict[Any, Any] = {_THEIRS: _SafeOpen, safetensors.torch.load_file: _load_file}

__all__ = ["Patch", "patch"]
