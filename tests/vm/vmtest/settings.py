"""What the environment says, and the two exceptions of this package."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Skip(Exception):
    """Something is missing on this machine: the reason, one line."""


class Failed(Exception):
    """Something that was there did not work: the reason, one or more lines."""


@dataclass(frozen=True)
class Settings:
    """The variables that `scripts/vm --help` lists."""

    target: Path
    cache: Path
    refresh: bool = False
    seconds: int | None = None
    filter: str = ""
    gib: tuple[int, ...] = (1, 8, 32)
    align: tuple[str, ...] = ("auto", "1GiB", "2MiB", "4KiB", "none")
    rounds: int = 10
    sizes: tuple[int, ...] = (512 << 10, 8 << 20)
    jobs: int = 1
    mirror: str | None = None
    profiles: Path | None = None

    @classmethod
    def from_environment(cls, env=os.environ, refresh=False):
        target = Path(env.get("CARGO_TARGET_DIR") or ROOT / "target")
        found = {"target": target, "cache": Path(env.get("DMALANE_VM_CACHE") or target / "vm"), "refresh": refresh}
        kinds = {
            "seconds": int, "filter": str, "gib": lambda text: tuple(map(int, text.split())),
            "sizes": lambda text: tuple(map(int, text.split())),
            "align": lambda text: tuple(text.split()), "rounds": int, "jobs": int, "mirror": str, "profiles": Path,
        }  # fmt: skip
        for field, kind in kinds.items():
            name = f"DMALANE_VM_{field.upper()}"
            if env.get(name):
                try:
                    found[field] = kind(env[name])
                except ValueError:
                    raise SystemExit(f"{name}={env[name]}: not a number") from None
        return cls(**found)
