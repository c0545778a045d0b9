"""What hears the engine's sums takes the GIL only while it holds no lock of its own: else a run may stand still."""

from __future__ import annotations

import subprocess
import sys

import pytest

from op_tools.watch import sums

_SCRIPT = """
import ctypes, sys, threading
import torch
from op_tools.watch import sums

sys.setswitchinterval(1e-5)
library = sums.LIBRARY.wait()
callbacks = sums._Before(lambda number: 0), sums._After(lambda number, result: None)
assert library.op_tools_sums_prepare(id(torch), *callbacks)

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, sent):
        return 2 * sent

done = threading.Event()

def train():
    x = torch.ones(3, requires_grad=True)
    while not done.is_set():
        Twice.apply(Twice.apply(x)).sum().backward()

thread = threading.Thread(target=train, daemon=True)
thread.start()
for _ in range(3_000):
    library.op_tools_sums_begin(0)
    sum(range(200))
    library.op_tools_sums_end()
done.set()
thread.join(20)
print("done" if not thread.is_alive() else "stands still")
"""


def test_nodes_of_the_users_own_in_another_thread() -> None:
    if sums.LIBRARY.wait() is None:
        pytest.skip("there is no compiler")
    try:
        ran = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("two threads wait for each other")
    assert ran.stdout.strip() == "done", ran.stderr[-2000:]
