"""Loaders compared: the same files, cold and warm, each run in a process of its own.

`python -m dmalane.compare FILE` is the command. In a program: `c = Comparison(path); c.run(); c.json()`.
"""

from .measure import Comparison, Loader

__all__ = ["Comparison", "Loader"]
