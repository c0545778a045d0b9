"""What an open live page costs a training step, and how large the page of many records is.

python -m benchmarks.live_page [--pairs 20] [--seconds 2] [--records 1000000]

The training runs under OpTimeMeasure; the server and a client that follows it as a browser does (events, head, the
table of the view) are processes of their own, stopped and continued in turns, so that both halves of a pair see the
same machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_CLIENT = """
import sys, urllib.request
base, token = sys.argv[1].split("/?")
for line in urllib.request.urlopen(f"{base}/events?{token}"):
    if line.startswith(b"data:"):
        for path in ("head", "table/times"):
            urllib.request.urlopen(f"{base}/{path}?{token}").read()
"""


def cost(pairs: int, seconds: float) -> tuple[list[float], list[float], list[float]]:
    """Of each pair: median step time with the page open divided by that without, the same of its CPU time, and the
    share of a core that the server took.
    """
    import torch

    import ditorch  # noqa: F401
    import op_tools

    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 256).cuda()

    def steps(until: float) -> list[tuple[float, float]]:
        taken = []
        while time.perf_counter() < until:
            began, used = time.perf_counter(), time.thread_time()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            taken.append((time.perf_counter() - began, time.thread_time() - used))
        return taken

    walls, own, shares = list[float](), list[float](), list[float]()
    with op_tools.OpTimeMeasure():
        steps(time.perf_counter() + 2)
        folder = os.environ["OP_TOOLS_RESULTS_DIR"]
        command = [sys.executable, "-m", "op_tools.cli", "ui", folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with subprocess.Popen([sys.executable, "-c", _CLIENT, address]) as client:
                try:
                    steps(time.perf_counter() + seconds)
                    for pair in range(pairs):
                        medians = {}
                        for on in (True, False) if pair % 2 else (False, True):
                            for process in (server, client):
                                process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                            began, used = time.perf_counter(), _cpu_seconds(server.pid)
                            times = zip(*steps(began + seconds))
                            if on:
                                shares.append((_cpu_seconds(server.pid) - used) / (time.perf_counter() - began))
                            medians[on] = [statistics.median(some) for some in times]
                        walls.append(medians[True][0] / medians[False][0])
                        own.append(medians[True][1] / medians[False][1])
                finally:
                    for process in (client, server):
                        process.send_signal(signal.SIGCONT)
                        process.kill()
    return walls, own, shares


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_of_many(records: int) -> tuple[float, float, float]:
    """Seconds to read and to put together a page of so many comparisons, and its size in MB."""
    from ditorch_common.page import write_page
    from op_tools.report import Run, page_of
    from tests.unit.op_tools.report_runs import Written

    with tempfile.TemporaryDirectory() as folder:
        written = Written(Path(folder))
        scatter = random.Random(0)
        for n in range(records):
            module, op = f"model.layers.{n // 4 % 48}.mlp", f"torch.op{n // 4 % 60}"
            written.compared(n // 4, step=n // 8000, op=op, module=module, excess=scatter.random() * (n % 4 > 1))
            if n % 4000 == 0:
                written.store.flush()
        written.end().close()
        began = time.perf_counter()
        run = Run(Path(folder))
        read = time.perf_counter()
        path = write_page(page_of(run), Path(folder) / "run.html")
        return read - began, time.perf_counter() - read, path.stat().st_size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--records", type=int, default=1_000_000)
    given = parser.parse_args()
    if given.pairs:
        with tempfile.TemporaryDirectory() as folder:
            os.environ.update(OP_TOOLS_RESULTS_DIR=folder, OP_TOOLS_CONSOLE="off")
            *found, shares = cost(given.pairs, given.seconds)
            print(f"the server took {statistics.mean(shares):.1%} of a core")
            for ratios, what in zip(found, ("step", "CPU time of a step")):
                low, _, high = statistics.quantiles(ratios, n=4)
                middle = statistics.median(ratios)
                spread = f"half of the pairs from {low - 1:+.1%} to {high - 1:+.1%}"
                print(f"{what} with the page open: {middle - 1:+.1%} ({spread})")
    if given.records:
        read, made, size = page_of_many(given.records)
        print(f"{given.records:,} records: read in {read:.1f} s, page in {made:.1f} s, {size:.1f} MB")


if __name__ == "__main__":
    main()
