"""Page tables built by `dmalane iopt build` under QEMU's IOMMUs: a device does DMA through them.

For longer runs: scripts/oracle.
"""

import shutil

import pytest

pytest.importorskip("unicorn", reason="the package unicorn could not be installed")

import iopt_oracle  # noqa: E402
import iopt_qemu  # noqa: E402
from iopt_spec import Spec  # noqa: E402

BY_FORMAT = pytest.mark.parametrize("iommu", iopt_qemu.IOMMUS, ids=lambda i: i.format, indirect=True)


@pytest.fixture
def iommu(request, dmalane):
    """An IOMMU, with what the program says of its format."""
    if shutil.which(request.param.program) is None:
        pytest.skip(f"no {request.param.program} (Debian: apt-get install {request.param.package})")
    return request.param.of(iopt_oracle.formats(dmalane))


@BY_FORMAT
def test_an_iommu_agrees(dmalane, tmp_path, iommu):
    count = 1500 // iommu.cost  # scripts/oracle takes more
    tally = iopt_qemu.compare(dmalane, iommu, count, 1, tmp_path, per_image=count // 3)
    assert tally["DMAs"] > 3.3 * count and tally["images"] == 3
    assert count // 3 < tally["mapped"] < count * 5 // 6 and tally["read-only"] > count // 15
    print(dict(tally))


@BY_FORMAT
@pytest.mark.parametrize("wrong", ["pa", "access", "missing"])
def test_a_difference_is_found(dmalane, tmp_path, monkeypatch, iommu, wrong):
    written = Spec.json

    def falsified(self, rng):
        spec = written(self, rng)
        longest = max(spec["mappings"], key=lambda m: int(str(m["len"]), 0))
        if wrong == "pa":
            longest["pa"] = hex(int(str(longest["pa"]), 0) ^ 1 << iommu.leaves[0])
        elif wrong == "access":
            longest["access"] = "r" if "w" in longest["access"] else "rw"
        else:
            spec["mappings"].remove(longest)
        return spec

    monkeypatch.setattr(Spec, "json", falsified)
    with pytest.raises(iopt_oracle.Difference, match="(read|write) at|cannot be (read|written)"):
        iopt_qemu.compare(dmalane, iommu, 1000 // iommu.cost, 2, tmp_path)
