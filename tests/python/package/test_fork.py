"""Objects in a child of `fork`, which has none of the threads of its parent."""

import subprocess
import sys
import textwrap

import pytest

dmalane = pytest.importorskip("dmalane", reason="the package is not installed: scripts/check python builds it")

PROGRAM = """
import os, sys, threading
import dmalane

path = sys.argv[1]
f = dmalane.safe_open(path, "bytes", memory_limit="16MiB")
stream = f.tensors()
name, lent = next(stream)
tensors = dmalane.load_file(path, "bytes")
device = dmalane.open(sys.argv[2])
on_device = dmalane.load_file(path, device=device)
uses = {
    "stream": lambda: next(stream),
    "new stream": lambda: next(f.tensors()),
    "file": lambda: f.get_tensor(name),
    "slice": lambda: f.get_slice(name)[0],
    "report": f.report,
    "device": lambda: device.read(device.alloc(16), 16),
    "load": lambda: dmalane.load_file(path, device=device),
    "device tensor": on_device[name].tobytes,
}
child = os.fork()
if child == 0:
    wrong = []
    for what, use in uses.items():
        try:
            use()
            wrong.append(what)
        except dmalane.ForkedError as error:
            if "spawn" not in str(error) or not isinstance(error, RuntimeError):
                wrong.append(str(error))
    # Memory is a copy of its own, and files are opened as ever.
    if tensors[name].tobytes() != lent.tobytes() or dmalane.load_file(path, "bytes")[name].tobytes() != lent.tobytes():
        wrong.append("memory")
    # What tells what it is, and the ends of `with`.
    if path not in repr(f):
        wrong.append(repr(f))
    with f:
        pass
    del uses, use, stream, f, device, on_device, lent, tensors
    import gc; gc.collect()
    print(wrong or "refused", flush=True)
    os._exit(bool(wrong))
_, status = os.waitpid(child, 0)
assert status == 0
# The parent has lost nothing.
lent.release()
assert on_device[name].tobytes() == f.get_tensor(name).tobytes()
left = 0
for _, tensor in stream:
    left += 1
    tensor.release()
assert left == 23, left
"""


# The software card has a thread, which a child lacks.
@pytest.mark.parametrize("device", ["ram:128MiB", "soft,ddr=128MiB"])
def test_a_forked_child_is_told_instead_of_waiting(large, device):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(large), device],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_workers_that_are_forked_open_for_themselves(model):
    """As the workers of a DataLoader do, when the object that they got opens in them."""
    program = """
        import multiprocessing, sys
        import dmalane

        dmalane.load_file(sys.argv[1])
        def work(name):
            with dmalane.safe_open(sys.argv[1], "bytes") as f:
                return f.get_tensor(name).nbytes
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(work, ["U8.matrix", "F32.matrix"]))
        """
    command = [sys.executable, "-c", textwrap.dedent(program), str(model[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[48, 192]\n", done.stderr


def test_a_child_waits_for_no_thread_of_its_parent(tmp_path):
    """Whatever the threads of the parent are in the middle of, memory comes and goes in the child."""
    import numpy as np

    path = tmp_path / "m.safetensors"
    dmalane.save_file({f"t{i:03}": np.zeros(4096, "u1") for i in range(200)}, path)
    program = """
        import os, signal, sys, threading
        import dmalane

        f = dmalane.safe_open(sys.argv[1], "bytes", memory_limit="1GiB")
        lent = [f.get_tensor(name) for name in f.keys()]
        def read():
            while True:
                f.get_tensor("t000")
        for _ in range(3):
            threading.Thread(target=read, daemon=True).start()
        for i in range(80):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                lent.clear()
                os._exit(len(dmalane.load_file(sys.argv[1], "bytes")) != 200)
            _, status = os.waitpid(child, 0)
            if status:
                print(f"child {i}: {status}", flush=True)
                os._exit(1)
        os._exit(0)
        """
    command = [sys.executable, "-c", textwrap.dedent(program), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
