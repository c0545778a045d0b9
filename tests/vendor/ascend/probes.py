"""Small CUDA programs, one per line: what CUDA code may expect, tried on the real torch_npu.

    python -m tests.vendor.ascend.probes ditorch          # under ditorch
    python -m tests.vendor.ascend.probes transfer_to_npu  # the same programs under the vendor's own shim

A line of probes.txt is ``group: statements``; it passes when it raises nothing. The last line of the output counts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

FACTORIES = """
empty(2) ones(2) zeros(2) full((2,),1.) rand(2) randn(2) randint(5,(2,)) randperm(4) arange(4) linspace(0,1,3)
logspace(0,1,3) eye(2) tensor([1.,2.]) as_tensor([1]) asarray([1.]) scalar_tensor(1.) empty_strided((2,),(1,))
hann_window(4) hamming_window(4) bartlett_window(4) blackman_window(4) kaiser_window(4) tril_indices(3,3)
triu_indices(3,3) fft.fftfreq(4) fft.rfftfreq(4) sparse_coo_tensor([[0],[1]],[1.],(2,2)) empty_like(c) ones_like(c)
zeros_like(c) full_like(c,1.) rand_like(c) randn_like(c) randint_like(c,3)
"""
METHODS = """
to('cuda') to('cuda:0') to(torch.device('cuda')) to(device='cuda') to('cuda',torch.float16) to('cuda',non_blocking=True)
to(x) cuda() cuda(0) cuda('cuda:0') cuda(device=0) cuda(non_blocking=True) type(torch.cuda.FloatTensor)
type('torch.cuda.HalfTensor') new_zeros(2,device='cuda') new_empty(2,device='cuda') new_ones(2,device='cuda')
new_full((2,),1.,device='cuda') new_tensor([1.],device='cuda') pin_memory().cuda(non_blocking=True)
"""
PROBES = Path(__file__).with_name("probes.txt")


def probes() -> list[tuple[str, str]]:
    """Every probe as (group, statements)."""
    made = []
    for call in FACTORIES.split():
        open_, _, rest = call.partition("(")
        device = "device='cuda')"
        made.append(("factory", f"assert torch.{open_}({rest[:-1]}, {device}.is_cuda"))
    made += [("move", f"y = c.{call}; assert y.is_cuda") for call in METHODS.split()]
    for line in PROBES.read_text().splitlines():
        group, _, code = line.partition(": ")
        made.append((group, code))
    return made


def scope() -> dict[str, Any]:
    """The names that probes use."""
    import torch
    import torch.distributed as dist

    def step(module: Any) -> Any:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        return list(module.parameters())

    def refuses(name: str) -> None:
        function = torch.cuda
        for part in name.split(".")[2:]:
            function = getattr(function, part)
        try:
            function()
        except RuntimeError as error:
            if name in str(error):
                return
            raise
        raise AssertionError(f"{name} did something")

    x = torch.tensor([1.0, 2.0], device="cuda")
    m = torch.nn.Linear(2, 2).cuda()
    c = torch.tensor([1.0, 2.0])
    found = {"torch": torch, "dist": dist, "x": x, "c": c, "m": m, "io": io, "K": []}
    return {**found, "step": step, "refuses": refuses}


def run(shim: str) -> dict[str, str]:
    """Outcome of each probe: "" or the error."""
    warnings.simplefilter("ignore")
    import torch

    if shim == "ditorch":
        import ditorch  # noqa: F401
    else:
        import torch_npu  # noqa: F401
        from torch_npu.contrib import transfer_to_npu  # noqa: F401
    from tests.vendor.ascend.cpu_kernels import enter

    kernels = enter()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    names = scope()
    outcome = {}
    for number, (group, code) in enumerate(probes()):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(code, {**names, "__name__": "probe"})
                error = ""
            except Exception as problem:
                error = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:200]
                if os.environ.get("PROBE_TRACE") == str(number):
                    traceback.print_exc()
        outcome[f"{number} {group}: {code}"] = error
        torch.cuda.set_device(0)
        torch.set_default_device("cpu")
    torch.distributed.destroy_process_group()
    del kernels
    return outcome


if __name__ == "__main__":
    found = run(sys.argv[1])
    for probe, error in found.items():
        if error:
            print(f"{probe}\n    {error}")
    passed = sum(not error for error in found.values())
    print(json.dumps({"shim": sys.argv[1], "passed": passed, "of": len(found)}))
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w") as file:
            json.dump(found, file, indent=1)
    sys.stdout.flush()
    os._exit(0)
