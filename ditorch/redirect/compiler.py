"""Keeps ``torch.jit.script`` and ``torch.compile`` working on code that says ``cuda``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.jit

from ditorch.console import say
from ditorch.patching import Ledger, Patch
from ditorch.redirect.devices import Devices, after_import, redirect_parameters


def install(ledger: Ledger, devices: Devices) -> None:
    """Redirect the two compilers' entry points.

    Example: ``install(ledger, devices); torch.jit.script(lambda_with_cuda)``
    """
    _install_script(ledger, devices)
    _install_compile(ledger, devices)
    _install_flex(ledger, devices)


def _install_script(ledger: Ledger, devices: Devices) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
            # Names in a scripted class are looked up in the caller's frame, which is two further up now.
            compiled = original(obj, optimize, _frames_up + 2, *args, **kwargs)
            _translate_script(devices, compiled)
            return compiled

        return script

    ledger.redirect(torch.jit.script, make, "device constants in the script mean the accelerator")
    redirect_parameters(
        ledger, torch.jit.load, devices.real, {"map_location": 1}, "map_location='cuda' means the accelerator"
    )


def _translate_script(devices: Devices, compiled: Any) -> None:
    if isinstance(compiled, torch.jit.ScriptFunction):
        _translate_block(devices, compiled.graph)
    elif isinstance(compiled, torch.jit.ScriptModule):
        modules: Any = compiled.modules()
        for module in modules:
            for name in module._c._method_names():
                _translate_block(devices, module._c._get_method(name).graph)


def _translate_block(devices: Devices, block: Any) -> None:
    for node in block.nodes():
        for inner in node.blocks():
            _translate_block(devices, inner)
        if node.kind() == "prim::Constant" and str(node.output().type()) == "Device":
            real = devices.inwards.get(node.s("value"))
            if real is not None:
                node.s_("value", str(real))


def _install_compile(ledger: Ledger, devices: Devices) -> None:
    prepared: list[bool] = []

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            if not prepared:
                _prepare_dynamo(ledger, devices)
                prepared.append(True)
            if kwargs.get("backend", "inductor") == "inductor" and not _inductor_knows(devices):
                kwargs["backend"] = _vendors_compiler(devices) or "aot_eager"
                kwargs.pop("mode", None)
                kwargs.pop("options", None)
            return original(*args, **kwargs)

        return compile

    why = "inductor where it can generate code for the device, else aot_eager: captured, not fused"
    ledger.redirect(torch.compile, make, why, "emulated")


def _vendors_compiler(devices: Devices) -> Callable[..., Any] | None:
    """The first of the vendor's Dynamo backends that is registered here."""
    from torch._dynamo.backends import registry

    for name in devices.backend.compilers:
        try:
            found = registry.lookup_backend(name)
        except Exception:
            continue  # not registered
        return _or_eager(name, found)
    return None


def _or_eager(name: str, vendor: Callable[..., Any]) -> Callable[..., Any]:
    """The vendor's Dynamo backend; where a package that it needs is missing, aot_eager, and a line says so."""

    def compile_graph(graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._dynamo.backends import registry

        try:
            return vendor(graph, inputs, **options)
        except ImportError as error:
            say(f"torch.compile: the vendor's backend {name} cannot be loaded ({error}); aot_eager is used")
            return registry.lookup_backend("aot_eager")(graph, inputs)

    return compile_graph


def _inductor_knows(devices: Devices) -> bool:
    from torch._inductor.codegen import common

    register: Callable[[], None] | None = getattr(common, "init_backend_registration", None)
    if register is not None:
        register()
    return common.get_scheduling_for_device(devices.type) is not None


def _prepare_dynamo(ledger: Ledger, devices: Devices) -> None:
    """Wrapped factories go into the graph as they are; a tensor's device is cuda in compiled code too."""
    import torch._dynamo
    from torch._dynamo import variables

    for patch in list(ledger.patches):
        name = patch.what.removeprefix("torch.")
        wrapper = getattr(torch, name, None)
        if getattr(wrapper, "__wrapped__", None) is not None and patch.how == "replaced":
            torch._dynamo.allow_in_graph(wrapper)
    # it knows functions by what `torch.arange` and the like were when it first looked
    known = getattr(torch._dynamo.trace_rules, "clear_lru_cache", None)
    if known is not None:
        why = "compiled code knows wrapped factories, and without ditorch the original ones"
        ledger.record(Patch("torch._dynamo.trace_rules", why, how="registered", undo=known))
    if not devices.show_as_cuda:
        return
    cls = variables.TensorVariable
    attribute: Any = cls.method_attr_device

    def method_attr_device(self: Any, tx: Any) -> Any:
        found = attribute(self, tx)
        if found is None or not found.is_python_constant():
            return found
        return variables.ConstantVariable.create(devices.shown(found.as_python_constant()))

    ledger.replace(cls, "method_attr_device", method_attr_device, "compiled user code sees cuda:N")


def _install_flex(ledger: Ledger, devices: Devices) -> None:
    """Eager flex_attention runs wherever its steps do, but names the device types that it was tried on."""

    def redirect(module: Any) -> None:
        check = getattr(module, "_validate_device", None)
        if check is None:
            return

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def validate(query: Any, *rest: Any) -> None:
                if query.device.type != devices.type:
                    original(query, *rest)

            return validate

        ledger.redirect(check, make, "eager flex_attention on the accelerator")

    if devices.type == "cpu":
        return
    after_import(ledger, "torch.nn.attention.flex_attention", redirect, "eager flex_attention")
