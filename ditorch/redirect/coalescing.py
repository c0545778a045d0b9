"""``torch.distributed._coalescing_manager``: a device named cuda, and collectives that cannot be put off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ditorch.patching import Ledger
from ditorch.redirect.devices import Devices


def install(ledger: Ledger, devices: Devices) -> None:
    """Translate the manager's device; where the collectives cannot be grouped, they are joined by PyTorch itself.

    Example: ``with dist._coalescing_manager(device=torch.device("cuda", 0)): dist.all_reduce(x)``
    """
    manager = getattr(dist.distributed_c10d, "_coalescing_manager", None)
    generator = getattr(manager, "__wrapped__", None)
    if generator is None:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def manage(group: Any = None, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            if device is not None:
                device = devices.real(device)
                group = group or dist.distributed_c10d._get_default_group()
                if not getattr(group._get_backend(device), "supports_coalescing", True):
                    device = None
            return original(group, device, *args, **kwargs)

        return manage

    ledger.redirect(generator, make, "cuda means the accelerator", what="torch.distributed._coalescing_manager")


def at_once(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, run now even where a manager would put it off: what follows it needs its result.

    Example: ``at_once(dist.all_reduce)(x, dist.ReduceOp.SUM, None, True).wait()``
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        waiting = dist.distributed_c10d._world.pg_coalesce_state
        if not waiting:
            return collective(*args, **kwargs)
        held = dict(waiting)
        waiting.clear()
        try:
            return collective(*args, **kwargs)
        finally:
            waiting.update(held)

    return call
