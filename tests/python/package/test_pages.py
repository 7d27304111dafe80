"""The code of the documentation."""

import json
import re
from pathlib import Path

import pytest

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")

pytest.importorskip("numpy")

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("page", ["how-to/python.md", "reference/python.md"])
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    names = {}
    for block in blocks:
        # Padded, so that a failure names the line of the page.
        lines = "\n" * (text.count("\n", 0, block.start()) + 1)
        exec(compile(lines + block[1], page, "exec"), names)


def test_the_notebook_runs(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "notebooks/loading.ipynb").read_text())["cells"]
    names = {}
    for n, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"loading.ipynb, cell {n}", "exec"), names)
    assert len(matplotlib.pyplot.get_fignums()) == 3
