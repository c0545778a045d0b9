"""The second signal ends a process at once, inside a kernel as well."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_IN_A_KERNEL = """
import hashlib, signal, sys
sys.path.insert(0, {root!r})
from ditorch_common.signals import ends_at_second_signal
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
with ends_at_second_signal():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", {work})  # like a kernel: no Python, no GIL
print("left")
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_the_second_signal_ends_the_process_inside_a_kernel(signals: int) -> None:
    script = _IN_A_KERNEL.format(root=str(ROOT), work=10**6 if signals == 1 else 2 * 10**9)
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    started = time.monotonic()
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    output, errors = process.communicate(timeout=25)
    assert time.monotonic() - started < 20
    if signals == 1:
        assert (process.returncode, "left" in output) == (0, True)
    else:
        assert process.returncode == 128 + signal.SIGTERM
        assert "ended at once by a second SIGTERM" in errors
