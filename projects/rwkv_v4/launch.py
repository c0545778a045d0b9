"""Starts the trainer on several ranks: ``python -m projects.rwkv_v4.launch --nproc-per-node 2 --config FILE ...``.

torchrun does that too, but it answers Ctrl-C with a traceback of its own, status 1, and half a minute for the ranks to
end. Here the ranks get the time to write a checkpoint, and the status is 130.
"""

from __future__ import annotations

import argparse
import os
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Start the ranks and wait for them; the exit status is theirs."""
    parser = argparse.ArgumentParser(
        description="Train RWKV-v4 on several ranks. What is not listed here goes to the trainer.", allow_abbrev=False
    )
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", required=True, metavar="N", help="ranks on this machine"
    )
    parser.add_argument("--nnodes", default="1", help="machines")
    parser.add_argument("--node-rank", "--node_rank", default="0", help="which of them this is")
    parser.add_argument("--master-addr", "--master_addr", help="address of the first one")
    parser.add_argument("--master-port", "--master_port", help="and a free port there")
    ours, rest = parser.parse_known_args(arguments)
    place = ["--standalone"] if ours.nnodes == "1" and ours.master_port is None else []
    for name in ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"):
        if getattr(ours, name) is not None and not (place and name in ("nnodes", "node_rank", "master_addr")):
            place += [f"--{name}", getattr(ours, name)]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    try:
        run.main([*place, "-m", "projects.rwkv_v4.train", *rest])
    except SignalException as stopped:
        print(f"Main process received {stopped.sigval.name}, exiting", file=sys.stderr)
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        if codes != {INTERRUPTED}:
            print(f"error: ranks ended with status {', '.join(map(str, sorted(codes)))}", file=sys.stderr)
        return max(codes) if min(codes) > 0 else 1
    except KeyboardInterrupt:  # before the ranks were started
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
