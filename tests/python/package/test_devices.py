"""Tensors in memory of devices, by DLPack. The tests call the CUDA driver, one in software, as a framework does."""

import ctypes
import gc
import threading
import time

import dmalane
import ml_dtypes
import numpy as np
import pytest
from package.capsule import Capsule
from package.models import DTYPES

CPU, CUDA = 1, 2
READ_ONLY, COPIED = 1, 2
INTEGER, UNSIGNED, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
CODES = {
    "BOOL": BOOL, "U8": UNSIGNED, "U16": UNSIGNED, "U32": UNSIGNED, "U64": UNSIGNED, "I8": INTEGER, "I16": INTEGER,
    "I32": INTEGER, "I64": INTEGER, "F16": FLOAT, "F32": FLOAT, "F64": FLOAT, "BF16": BFLOAT, "C64": COMPLEX,
    "F8_E4M3": 10, "F8_E4M3FNUZ": 11, "F8_E5M2": 12, "F8_E5M2FNUZ": 13, "F8_E8M0": 14,
}  # fmt: skip


def on_fake(driver, path, kind="0"):
    device = dmalane.open(f"cuda:{kind},lib={driver.path}")
    return device, dmalane.load_file(path, device=device)


@pytest.mark.parametrize(("kind", "flags"), [("0", 0), ("0,vmm", READ_ONLY)])
def test_cuda_tensors_are_lent_as_they_lie(driver, model, kind, flags):
    path, tensors = model
    _, ours = on_fake(driver, path, kind)
    for name, (dtype, shape, data) in tensors.items():
        tensor = ours[name]
        assert tensor.__dlpack_device__() == (CUDA, 0)
        if DTYPES[dtype] < 8:
            with pytest.raises(BufferError, match="no layout for the packed type"):
                tensor.__dlpack__(max_version=(1, 0))
            continue
        capsule = Capsule(tensor.__dlpack__(max_version=(1, 1), stream=1))
        assert (capsule.name, capsule.managed.flags, capsule.managed.version[0]) == (b"dltensor_versioned", flags, 1)
        lent = capsule.tensor
        assert (list(lent.device), lent.ndim, lent.byte_offset) == ([CUDA, 0], len(shape), 0)
        assert (lent.code, lent.bits, lent.lanes) == (CODES[dtype], DTYPES[dtype], 1), dtype
        assert [lent.shape[i] for i in range(lent.ndim)] == shape
        assert shape != [3, 16] or [lent.strides[i] for i in range(2)] == [16, 1]
        assert (lent.data or 0) == (tensor.address or 0)
        # Without waiting for anything: what was loaded is there.
        assert not data or driver.read(lent.data, len(data)) == data, name
    if flags:
        with pytest.raises(BufferError, match="legacy"):
            ours["F32.matrix"].__dlpack__()
    else:
        assert Capsule(ours["F32.matrix"].__dlpack__()).name == b"dltensor"


def test_a_capsule_keeps_the_load_and_frees_it_once(driver, model):
    path, tensors = model
    device, ours = on_fake(driver, path)
    free = device.info()["free_bytes"]
    data = tensors["BF16.matrix"][2]
    capsule = Capsule(ours["BF16.matrix"].__dlpack__(max_version=(1, 0), stream=-1))
    pointer, unused = capsule.tensor.data, ours["F32.matrix"].__dlpack__(max_version=(1, 0))
    give_back = capsule.consume()
    del ours, capsule
    gc.collect()
    del unused
    gc.collect()
    assert device.info()["free_bytes"] == free and driver.read(pointer, len(data)) == data
    # A kernel of the consumer that has not ended when its tensor dies.
    driver.control("delay 200000")
    driver.begin_read(pointer, len(data))
    give_back()
    driver.control("delay 20")
    assert device.info()["free_bytes"] > free
    assert driver.page[: len(data)] == data, "memory is freed behind the work that uses it"


def test_others_run_while_memory_waits_for_the_gpu(driver, model):
    path, tensors = model
    device, ours = on_fake(driver, path)
    gaps, stop = [0.0], threading.Event()

    def watch():
        last = time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            gaps[0], last = max(gaps[0], now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        driver.control("delay 1000000")
        driver.begin_read(ours["BF16.matrix"].address, len(tensors["BF16.matrix"][2]))
        begun = time.monotonic()
        del ours
        gc.collect()
        took = time.monotonic() - begun
    finally:
        driver.control("delay 20")
        stop.set()
        watcher.join()
    assert took > 0.5 and gaps[0] < took / 2, (took, gaps[0])
    assert device.info()["free_bytes"] > 0


def test_a_capsule_outlives_device_and_tensors(driver, model):
    path, tensors = model
    device, ours = on_fake(driver, path)
    capsule = Capsule(ours["F64.matrix"].__dlpack__(max_version=(1, 0)))
    del device, ours
    gc.collect()
    data = tensors["F64.matrix"][2]
    assert driver.read(capsule.tensor.data, len(data)) == data


def test_requests_that_cannot_be_met(driver, model):
    _, ours = on_fake(driver, model[0])
    tensor = ours["F32.matrix"]
    with pytest.raises(BufferError, match="zero-copy"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="cross-device"):
        tensor.__dlpack__(dl_device=(CUDA, 1))
    with pytest.raises(BufferError, match="gets a copy"):
        tensor.__dlpack__(dl_device=(CPU, 0), copy=False)
    for bad in (0, -2, "x"):
        with pytest.raises(ValueError):
            tensor.__dlpack__(stream=bad)
    for stream in (None, -1, 1, 2, driver.stream.value):
        assert Capsule(tensor.__dlpack__(stream=stream, dl_device=(CUDA, 0), copy=False)).tensor.data == tensor.address


@pytest.mark.parametrize("device", ["ram:16MiB", "soft"])
def test_other_devices_give_copies_on_the_host_only(model, device):
    path, tensors = model
    ours = dmalane.load_file(path, device=device)
    tensor = ours["F32.matrix"]
    for lend in (tensor.__dlpack__, tensor.__dlpack_device__):
        with pytest.raises(BufferError, match="no pointers of CUDA"):
            lend()
    copy = np.from_dlpack(tensor, device="cpu")
    assert copy.shape == (3, 16) and copy.dtype == np.float32 and copy.tobytes() == tensors["F32.matrix"][2]
    copy[0, 0] = 1
    assert tensor.tobytes() == tensors["F32.matrix"][2]
    assert np.from_dlpack(ours["I64.empty"], device="cpu").shape == (0, 4)
    for version, name in ((None, b"dltensor"), ((1, 0), b"dltensor_versioned")):
        capsule = Capsule(ours["BF16.matrix"].__dlpack__(max_version=version, dl_device=(CPU, 0), copy=True))
        assert capsule.name == name and (version is None or capsule.managed.flags == COPIED)
        copied = ctypes.string_at(capsule.tensor.data, 96)
        assert np.frombuffer(copied, ml_dtypes.bfloat16).tobytes() == tensors["BF16.matrix"][2]


def test_a_report_has_the_time_of_verifying(model):
    def stage(verify):
        device = dmalane.open("ram:64MiB")
        tensors, report = device.load([model[0]], verify=verify)
        [found] = [stage for stage in report["stages"] if stage["stage"] == "verify"]
        return found["bytes"], found["wall_s"] > 0, sum(tensor.nbytes for tensor in tensors)

    assert stage(False)[:2] == (0, False)
    compared, took, total = stage(True)
    assert took and compared == total > 0
