"""Builds the stand-in of a vendor's device module from its surface: it takes what the real one takes, and no more.

Imported by packages that `vendor_stubs` writes, before ditorch is active, so the surfaces are loaded by path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PROJECT = Path(__file__).resolve().parents[3]
spec = importlib.util.spec_from_file_location(
    "_surfaces", PROJECT / "ditorch" / "backends" / "surfaces" / "__init__.py"
)
assert spec is not None
assert spec.loader is not None
surfaces = importlib.util.module_from_spec(spec)
sys.modules["_surfaces"] = surfaces  # dataclasses look their module up
spec.loader.exec_module(surfaces)

# What every device module has, where no surface of the vendor is at hand: names alone, called as torch.cuda's are.
NAMES = (
    "set_device synchronize empty_cache memory_allocated max_memory_allocated memory_reserved "
    "reset_peak_memory_stats manual_seed manual_seed_all get_rng_state set_rng_state current_stream "
    "default_stream set_stream get_device_name mem_get_info is_available device_count current_device "
    "get_device_properties stream memory_stats"
)
# torch's own functions that vendors import into their module; PyTorch asks every PrivateUse1 module for the last two.
ALWAYS = {"_is_in_bad_fork": "", "get_amp_supported_dtype": ""}


def answers(module: Any, device_type: str) -> dict[str, Any]:
    """What the stand-in's functions return."""
    state = torch.zeros(16, dtype=torch.uint8)
    return {
        "is_available": True,
        "device_count": 2,
        "current_device": 0,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "get_amp_supported_dtype": [torch.float16, torch.bfloat16],
        "mem_get_info": (1, 2),
        "memory_stats": {},
        "memory_snapshot": [],
        "get_device_name": "stub",
        "get_device_properties": SimpleNamespace(name="stub", total_memory=2, major=None),
        "get_device_capability": (9, 1),
        "get_rng_state": state,
        "get_rng_state_all": [state, state],
        "get_arch_list": [],
        "graph_pool_handle": (0, 1),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 5),
        **dict.fromkeys(("memory_cached", "max_memory_cached", "initial_seed", "recommended_max_memory"), 5),
        **dict.fromkeys(("current_allocated_memory", "driver_allocated_memory"), 4),
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }


def make(surface: Any, device_type: str, name: str) -> ModuleType:
    """A module with the surface's functions and classes, which notes its calls in ``calls``."""
    module: Any = ModuleType(name)
    module.calls = []
    found = answers(module, device_type)

    def note(called: str, given: dict[str, Any]) -> Any:
        given = {k: v for k, v in given.items() if k not in ("self", "cls", "_note")}
        module.calls.append((called, given))
        if called in ("current_stream", "default_stream"):
            return module.Stream()
        if called == "stream":
            return getattr(module, "StreamContext", lambda stream: torch.no_grad())(given["stream"])
        return found.get(called)

    for called, parameters in {**ALWAYS, **surface.functions}.items():
        setattr(module, called, _function(called, parameters, "", called, note))
    for called, methods in surface.classes.items():
        setattr(module, called, _class(called, methods, device_type, name, note))
    module.memory = module
    module.visible = {k: v for k, v in os.environ.items() if "VISIBLE" in k}
    module.default_generators = ()
    return module


def recorded(backend: str, device_type: str, name: str) -> ModuleType:
    """The stand-in from the surface that is kept for a backend, or from names alone."""
    return make(surfaces.recorded(backend) or by_name(), device_type, name)


def by_name() -> Any:
    functions = {n: surfaces.of_module(torch.cuda).functions[n] for n in NAMES.split()}
    classes = {
        "Stream": {"__new__": "device=, priority=, **kwargs"},
        "Event": {"__new__": "enable_timing=, blocking=, interprocess="},
    }
    return surfaces.Surface("names only", "none", functions, classes)


def _function(called: str, parameters: str, first: str, label: str, note: Any) -> Any:
    scope: dict[str, Any] = {"_note": note}
    exec(surfaces.source_of(called, parameters, f"return _note({label!r}, dict(locals()))", first), scope)
    return scope[called]


def _class(called: str, methods: dict[str, str], device_type: str, module: str, note: Any) -> type:
    body: dict[str, Any] = {
        "__module__": module,
        "__enter__": lambda self: self,
        "__exit__": lambda self, *error: None,
        "device": property(lambda self: torch.device(device_type, 0)),
        f"{device_type}_stream": 7,
        f"{device_type}_event": 8,
    }
    for method, parameters in methods.items():
        if method == "__new__":
            scope: dict[str, Any] = {"_note": note}
            text = surfaces.source_of(
                "__new__", parameters, f"_note({called!r}, dict(locals())); return object.__new__(cls)", "cls"
            )
            exec(text, scope)
            body["__new__"] = scope["__new__"]
        elif method == "__init__":
            scope = {"_note": note}
            exec(surfaces.source_of("__init__", parameters, f"_note({called!r}, dict(locals()))", "self"), scope)
            body["__init__"] = scope["__init__"]
        else:
            body[method] = _function(method, parameters, "self", f"{called}.{method}", note)
    return type(called, (), body)
