"""``nccl`` means the backend's collectives; what those lack is declared per backend and filled here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ditorch.imports import AfterImport
from ditorch.patching import Ledger, Patch
from ditorch.redirect import coalescing
from ditorch.redirect.coalescing import at_once
from ditorch.redirect.devices import Devices, redirect_parameters
from ditorch_common.settings import DITORCH

REDUCE_VARIABLE = "DITORCH_REDUCE_FP32"
"""Set to 1 to sum half-precision tensors in float32 in all_reduce, reduce and reduce_scatter."""


def install(ledger: Ledger, devices: Devices) -> None:
    """Let ``nccl`` mean the backend's collectives.

    Example: ``install(ledger, devices); dist.init_process_group("nccl")``
    """
    if not dist.is_available():
        return
    _install_meshes(ledger, devices)
    _install_fsdp(ledger, devices)
    _install_device_type(ledger, devices)
    if devices.backend.collective is None:
        return
    _install_groups(ledger, devices)
    _install_gloo(ledger, devices)
    _install_comm_hooks(ledger)
    _install_split(ledger, devices)
    in_float32 = DITORCH.read(REDUCE_VARIABLE) != "0"
    fill_gaps(ledger, devices.backend.collective_gaps, in_float32)


class Names:
    """Translates the names of collective backends, also in ``cpu:gloo,cuda:nccl``.

    Example: ``Names("npu", "hccl").real("cpu:gloo,cuda:nccl") == "cpu:gloo,npu:hccl"``
    """

    def __init__(self, device_type: str, collective: str) -> None:
        self._pairs = (("cuda", device_type), ("nccl", collective))
        self._plain = {"nccl": collective}

    def real(self, name: Any) -> Any:
        if not isinstance(name, str):
            return name
        inwards = dict(self._pairs)
        return self._translate(name.lower(), inwards, self._plain, name)

    def shown(self, name: Any) -> Any:
        outwards = {real: cuda for cuda, real in self._pairs if real not in ("cpu", "gloo")}
        plain = {real: cuda for cuda, real in self._plain.items()}
        return self._translate(str(name), outwards, plain, name)

    @staticmethod
    def _translate(text: str, pairs: dict[str, str], plain: dict[str, str], given: Any) -> Any:
        if ":" not in text:
            return plain.get(text, given)
        parts = (part.split(":") for part in text.split(","))
        return ",".join(":".join(pairs.get(word.strip(), word.strip()) for word in part) for part in parts)


def _install_groups(ledger: Ledger, devices: Devices) -> None:
    assert devices.backend.collective is not None
    names = Names(devices.type, devices.backend.collective)
    why = f"nccl means {devices.backend.collective}"
    functions = dist.distributed_c10d
    options = _nccl_options(ledger)
    _install_group_devices(ledger, devices)
    coalescing.install(ledger, devices)

    def make(position: int) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if "backend" in kwargs:
                    kwargs["backend"] = names.real(kwargs["backend"])
                elif position < len(args):
                    args = (*args[:position], names.real(args[position]), *args[position + 1 :])
                if "device_id" in kwargs:
                    kwargs["device_id"] = devices.real(kwargs["device_id"])
                if options is not None and isinstance(kwargs.get("pg_options"), options):
                    del kwargs["pg_options"]
                return original(*args, **kwargs)

            return call

        return wrap

    ledger.redirect(functions.init_process_group, make(0), why)
    ledger.redirect(functions.new_group, make(2), why)
    if hasattr(functions, "new_subgroups"):
        ledger.redirect(functions.new_subgroups, make(4), why)
    redirect_parameters(ledger, functions.is_backend_available, names.real, {"backend": 0}, why)

    def show_name(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_backend(group: Any = None) -> Any:
            found = original(group)
            return found if devices.called_from_inside(2) else names.shown(found)

        return get_backend

    ledger.redirect(functions.get_backend, show_name, "user code sees nccl")

    def nccl_is_there(original: Callable[..., Any]) -> Callable[..., Any]:
        # PyTorch asks before it uses ProcessGroupNCCL, which does not exist here.
        return lambda: original() if devices.called_from_inside(2) else True

    ledger.redirect(functions.is_nccl_available, nccl_is_there, why)


def _install_comm_hooks(ledger: Ledger) -> None:
    """DDP wants NCCL for a hook that sends bfloat16, known by its name; other collectives take bfloat16, too."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def check(self: Any, hook: Callable[..., Any]) -> None:
            @functools.wraps(hook)
            def compress_hook(*args: Any) -> Any:
                raise AssertionError("only looked at, never called")

            compress_hook.__name__ = "compress_hook"
            original(self, compress_hook if hook.__name__.startswith("bf16_compress") else hook)

        return check

    check: Any = torch.nn.parallel.DistributedDataParallel._check_comm_hook
    ledger.redirect(check, make, "bf16_compress_hook without NCCL", what="DistributedDataParallel.register_comm_hook")


def _install_gloo(ledger: Ledger, devices: Devices) -> None:
    """gloo takes CUDA tensors; in a group of that name the accelerator's go by its own collectives."""
    device_type, collective = devices.type, devices.backend.collective or ""
    if device_type == "cpu":
        return
    config: Any = dist.distributed_c10d.BackendConfig

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, backend: Any) -> None:
            original(self, backend)
            found: dict[str, Any] = self.device_backend_map
            if device_type not in found and str(found.get("cpu")) == "gloo":
                self.device_backend_map = {"cpu": found["cpu"], device_type: dist.Backend(collective)}

        return init

    why = "gloo groups take tensors of the accelerator, as they take CUDA's"
    ledger.redirect(config.__init__, make, why, what="torch.distributed.BackendConfig")


def _install_split(ledger: Ledger, devices: Devices) -> None:
    """PyTorch splits groups that are bound to a device, which only NCCL and XCCL can: made anew elsewhere."""
    split: Any = getattr(dist.distributed_c10d, "split_group", None)
    if split is None or devices.type == "cpu":
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            parent = parent_pg or dist.group.WORLD
            if not split_ranks or parent is None or _can_split(parent, devices.type):
                return original(parent_pg, split_ranks, *args, **kwargs)
            named = dict(zip(("timeout", "pg_options", "group_desc"), args), **kwargs)
            mine = next((ranks for ranks in split_ranks if dist.get_rank(parent) in ranks), None)
            if mine is None:
                return None
            members = [dist.get_global_rank(parent, rank) for rank in mine]
            more = {key: named[key] for key in ("timeout", "group_desc") if named.get(key) is not None}
            return dist.new_group(members, use_local_synchronization=True, **more)

        return split_group

    ledger.redirect(split, make, "groups that cannot be split are made anew", "emulated")


def _can_split(group: Any, device_type: str) -> bool:
    try:
        return bool(group._get_backend(torch.device(device_type)).supports_splitting)
    except (AttributeError, RuntimeError):
        return False


def _install_device_type(ledger: Ledger, devices: Devices) -> None:
    """Checkpoints and their like ask PyTorch which device tensors lie on."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def available() -> Any:
            found = original()
            caller = str(sys._getframe(2).f_globals.get("__name__"))
            return devices.type if found == "cuda" and caller.startswith("torch.distributed") else found

        return available

    asked = getattr(torch._utils, "_get_available_device_type", None)
    if asked is not None and devices.type != "cpu":
        ledger.redirect(asked, make, "torch.distributed sees the real device type")


def _install_group_devices(ledger: Ledger, devices: Devices) -> None:
    group: Any = dist.ProcessGroup
    original = group._get_backend

    def _get_backend(self: Any, device: Any) -> Any:
        return original(self, devices.real(device))

    ledger.replace(group, "_get_backend", _get_backend, "a group's backend for cuda is the accelerator's")


def _nccl_options(ledger: Ledger) -> type | None:
    if hasattr(dist, "ProcessGroupNCCL"):
        return None

    class Options:
        """Settings of NCCL: accepted, of no use to other collectives."""

        def __init__(self, is_high_priority_stream: bool = False, **kwargs: Any) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(
                blocking=-1, cga_cluster_size=-1, min_ctas=-1, max_ctas=-1, net_name=None, split_share=0
            )
            self._timeout = dist.distributed_c10d.default_pg_timeout
            self.backend, self.group_name = "nccl", ""
            self.global_ranks_in_group: list[int] = []
            self.__dict__.update(kwargs)

    class ProcessGroupNCCL:
        """Exists so that code can name its ``Options``; no group is of this type."""

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    for owner in (dist, dist.distributed_c10d):
        ledger.replace(owner, "ProcessGroupNCCL", ProcessGroupNCCL, "its Options are accepted, unused", "hint")
    return Options


def _install_meshes(ledger: Ledger, devices: Devices) -> None:
    from torch.distributed import device_mesh

    why = "meshes of device type cuda lie on the accelerator"
    mesh: Any = device_mesh.DeviceMesh
    redirect_parameters(ledger, device_mesh.init_device_mesh, devices.real_type, {"device_type": 0}, why)
    redirect_parameters(ledger, mesh.__init__, devices.real_type, {"device_type": 1}, why)
    redirect_parameters(ledger, mesh.from_group, devices.real_type, {"device_type": 1}, why)
    if not devices.show_as_cuda:
        return

    def show(original: Callable[..., Any]) -> Callable[..., Any]:
        def device_type(self: Any) -> str:
            found: str = original(self)
            return "cuda" if found == devices.type and not devices.called_from_inside(2) else found

        return device_type

    if isinstance(vars(mesh).get("device_type"), property):
        ledger.redirect(
            mesh.device_type.fget, show, "user code sees cuda", what="torch.distributed.DeviceMesh.device_type"
        )


def _install_fsdp(ledger: Ledger, devices: Devices) -> None:
    def redirect(module: Any) -> None:
        redirect_parameters(
            ledger,
            module._get_device_from_device_id,
            devices.real,
            {"device_id": 0},
            "FSDP(device_id=torch.device('cuda', N))",
        )

    hook = AfterImport("torch.distributed.fsdp._init_utils", redirect)
    ledger.record(
        Patch("import of torch.distributed.fsdp", "FSDP's device_id", "mapped", "registered", None, hook.remove)
    )
    hook.install()


# --- gaps ------------------------------------------------------------------------------------------


class Then:
    """A handle on a collective and on what has to follow it; ``wait`` does both, once."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self, *args: Any) -> bool:
        done = bool(self._work.wait(*args)) if self._work is not None else True
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return done

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda future: (self.wait(), future.value())[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _finished(work: Any, finish: Callable[[], None] | None, async_op: bool) -> Any:
    if work is None and finish is None:
        return None
    if async_op:
        return work if finish is None else Then(work, finish)
    Then(work, finish or (lambda: None)).wait()
    return None


class Gaps:
    """Replacements for collectives, written with the ones every backend has."""

    def __init__(self, gaps: frozenset[str], in_float32: bool) -> None:
        self._average = "avg" in gaps
        self._float32 = in_float32

    def _plan(self, op: Any, size: int, tensor: torch.Tensor) -> tuple[Any, float | None, bool]:
        """The operation to ask for, the factor to scale by, and whether to go through float32."""
        scale = None
        if op == dist.ReduceOp.AVG and self._average:
            op, scale = dist.ReduceOp.SUM, 1.0 / size
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        return op, scale, self._float32 and half and op == dist.ReduceOp.SUM

    def all_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def all_reduce(
            tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            if _not_member(group):
                return original(tensor, op, group, async_op)
            op, scale, widen = self._plan(op, dist.get_world_size(group), tensor)
            if scale is None and not widen:
                return original(tensor, op, group, async_op)
            now = at_once(original)
            work, finish = self._reduce(tensor, scale, widen, lambda value: now(value, op, group, True), tensor)
            return _finished(work, finish, async_op)

        return all_reduce

    def reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(
            tensor: torch.Tensor,
            dst: int | None = None,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
            group_dst: int | None = None,
        ) -> Any:
            more = {} if group_dst is None else {"group_dst": group_dst}
            if _not_member(group):
                return original(tensor, dst, op, group, async_op, **more)
            op, scale, widen = self._plan(op, dist.get_world_size(group), tensor)
            if scale is None and not widen:
                return original(tensor, dst, op, group, async_op, **more)
            receives = _is_target(dst, group_dst, group)
            # Only `dst` gets the result; everyone else's tensor must stay as it was.
            source = tensor if receives else tensor.clone()
            work, finish = self._reduce(
                source, scale, widen, lambda value: at_once(original)(value, dst, op, group, True, **more), source
            )
            return _finished(work, finish, async_op)

        return reduce

    def _reduce(
        self,
        tensor: torch.Tensor,
        scale: float | None,
        widen: bool,
        run: Callable[[torch.Tensor], Any],
        target: torch.Tensor,
    ) -> tuple[Any, Callable[[], None] | None]:
        if widen:
            wide = tensor.float()
            work = run(wide)
            return work, lambda: _store(target, wide if scale is None else wide * scale)
        if tensor.is_floating_point() or tensor.is_complex():
            # As NCCL does it: scaled before the sum, so nothing has to follow the collective.
            assert scale is not None
            with torch.no_grad():
                tensor.mul_(scale)
            return run(tensor), None
        work = run(tensor)
        return work, lambda: _store(target, torch.div(target, round(1 / scale or 1), rounding_mode="trunc"))  # type: ignore[operator]

    def reduce_scatter_tensor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_scatter_tensor(
            output: torch.Tensor,
            input: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            if _not_member(group):
                return original(output, input, op, group, async_op)
            op, scale, widen = self._plan(op, dist.get_world_size(group), input)
            if scale is None and not widen:
                return original(output, input, op, group, async_op)
            wide = torch.empty_like(output, dtype=torch.float32) if widen else output
            source = input.float() if widen else input
            work = at_once(original)(wide, source if scale is None else source * scale, op, group, True)
            return _finished(work, (lambda: _store(output, wide)) if widen else None, async_op)

        return reduce_scatter_tensor

    def reduce_scatter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_scatter(
            output: torch.Tensor,
            input_list: Sequence[torch.Tensor],
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            if _not_member(group):
                return original(output, input_list, op, group, async_op)
            op, scale, widen = self._plan(op, dist.get_world_size(group), output)
            if scale is None and not widen:
                return original(output, input_list, op, group, async_op)
            wide = torch.empty_like(output, dtype=torch.float32) if widen else output
            sources = [tensor.float() if widen else tensor for tensor in input_list]
            if scale is not None:
                sources = [tensor * scale for tensor in sources]
            work = at_once(original)(wide, sources, op, group, True)
            return _finished(work, (lambda: _store(output, wide)) if widen else None, async_op)

        return reduce_scatter


def fill_gaps(ledger: Ledger, gaps: frozenset[str], in_float32: bool) -> None:
    """Redirect the collectives that the declared gaps concern.

    Example: ``fill_gaps(ledger, frozenset({"avg"}), in_float32=False)``
    """
    if not in_float32 and "avg" not in gaps:
        return
    filled = Gaps(gaps, in_float32)
    reasons = ["ReduceOp.AVG is missing"] if "avg" in gaps else []
    reasons += [f"{REDUCE_VARIABLE}=1"] if in_float32 else []
    why = " and ".join(reasons)
    for name, fill in (
        ("all_reduce", filled.all_reduce),
        ("reduce", filled.reduce),
        ("reduce_scatter", filled.reduce_scatter),
        ("reduce_scatter_tensor", filled.reduce_scatter_tensor),
        ("reduce_scatter_single", filled.reduce_scatter_tensor),
    ):
        function = getattr(dist.distributed_c10d, name, None)
        if function is not None:
            what = f"torch.distributed.{name}"
            ledger.redirect(function, fill, why, "emulated", what)


def _store(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)


def _not_member(group: Any) -> bool:
    return bool(dist.distributed_c10d._rank_not_in_group(group))


def _is_target(dst: int | None, group_dst: int | None, group: Any) -> bool:
    if group_dst is not None:
        return bool(dist.get_rank(group) == group_dst)
    return bool(dist.get_rank() == (dst or 0))
