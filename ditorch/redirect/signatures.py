"""Calls written for CUDA's signatures, bound to a vendor's: renamed, completed, or refused by name.

The comparison is made once, when a call is redirected. Where the two signatures agree there is no adapter and so
no cost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ditorch import surface
from ditorch.errors import UnsupportedError
from ditorch.redirect.devices import Devices

# Arguments that steer speed, diagnostics or memory and never results: dropped where a vendor does not have them.
HINT_ARGUMENTS = frozenset(
    {
        "abbreviated",
        "augment_with_fx_traces",
        "blocking",
        "capture_error_mode",
        "check_input_liveness",
        "compile_context",
        "enable_annotations",
        "global_record_annotations",
        "include_traces",
        "including_emulation",
        "no_split",
        "num_warmup_iters",
        "pool",
        "skip_actions",
        "use_on_oom",
    }
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_EMPTY = inspect.Parameter.empty


def signature_of(function: Any) -> inspect.Signature | None:
    """How a function or class is called, without ``self``; None where Python cannot tell.

    Example: ``signature_of(torch.cuda.Event)`` is ``(enable_timing=False, blocking=False, ...)``
    """
    try:
        if inspect.isclass(function):
            own = next((cls for cls in function.__mro__ if "__init__" in vars(cls) or "__new__" in vars(cls)), object)
            if own is object:
                return None
            # A __new__ is kept as a staticmethod. Of two, the one that takes anything says nothing.
            made = [getattr(m, "__func__", m) for n in ("__init__", "__new__") if (m := vars(own).get(n)) is not None]
            known = [_without(inspect.signature(function), 1) for function in made]
            return next((found for found in known if not _takes_anything(found)), known[0])
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    # `_record_memory_history(enabled, *args, **kwargs)` hands everything on to its `_impl`.
    if any(p.kind is p.VAR_KEYWORD for p in found.parameters.values()):
        inner = getattr(function, "__globals__", {}).get(f"{getattr(function, '__name__', '')}_impl")
        return found if inner is None else signature_of(inner)
    return found


def match(ours: inspect.Signature, theirs: inspect.Signature) -> dict[str, str | None] | None:
    """Which of the vendor's parameters each of CUDA's means (None: it has none); None where the two agree.

    Example: ``{"device": "device_name"}`` for Ascend's ``get_device_name``
    """
    cuda, vendor = list(ours.parameters.values()), list(theirs.parameters.values())
    kinds = {p.kind for p in vendor}
    takes_all = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    plain = [p for p in cuda if p.kind in (*_POSITIONAL, p.KEYWORD_ONLY)]
    names = {p.name for p in vendor if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)}
    found: dict[str, str | None] = {p.name: p.name if p.name in names else None for p in plain}
    taken = set(found.values())
    for index, parameter in enumerate(plain):
        other = vendor[index] if index < len(vendor) else None
        if found[parameter.name] or other is None or other.kind not in _POSITIONAL or other.name in taken:
            continue
        if other.name in found and other.kind is not other.POSITIONAL_ONLY:
            continue
        if other.kind is other.POSITIONAL_ONLY or _means_the_same(parameter, other):
            found[parameter.name] = other.name
            taken.add(other.name)
    if inspect.Parameter.VAR_POSITIONAL in kinds and None in found.values() and not takes_all:
        return None  # it takes anything by position: handed on as it is
    if takes_all:
        found = {name: target or name for name, target in found.items()}
    if _agree(plain, vendor, found, takes_all):
        return None
    return found


def _means_the_same(cuda: inspect.Parameter, vendor: inspect.Parameter) -> bool:
    """Whether two parameters in the same place have one meaning: both required, or a word in common."""
    if cuda.default is _EMPTY and vendor.default is _EMPTY:
        return True
    return any(len(word) > 3 and word in vendor.name for word in cuda.name.split("_"))


def _agree(
    cuda: list[inspect.Parameter],
    vendor: list[inspect.Parameter],
    found: Mapping[str, str | None],
    takes_all: bool,
) -> bool:
    if any(found[p.name] != p.name for p in cuda):
        return False
    positional = [p.name for p in vendor if p.kind in _POSITIONAL]
    wanted = [p.name for p in cuda if p.kind in _POSITIONAL]
    if not takes_all and positional[: len(wanted)] != wanted:
        return False
    given = {p.name for p in cuda}
    optional = {p.name for p in cuda if p.default is not _EMPTY}
    required = {p.name for p in vendor if p.default is _EMPTY and p.kind in (*_POSITIONAL, p.KEYWORD_ONLY)}
    return not (required - given) and not (required & optional)


def adapt(
    devices: Devices, name: str, cuda: Any, vendor: Callable[..., Any], skip: int = 0
) -> Callable[..., Any] | None:
    """A function with CUDA's signature that calls the vendor's, or None where both are called alike.

    ``skip`` leading parameters (``self``) are handed on as they are.

    Example: ``adapt(devices, "get_device_name", torch.cuda.get_device_name, torch.npu.get_device_name)``
    """
    ours, theirs = signature_of(cuda), signature_of(vendor)
    if ours is None or theirs is None:
        return None
    ours, theirs = _without(ours, skip), _without(theirs, skip)
    plan = match(ours, theirs)
    if plan is None:
        return None
    label = surface.label(devices.backend)
    bind, defaults = ours.bind, {p.name: p.default for p in ours.parameters.values()}
    only = [p.name for p in theirs.parameters.values() if p.kind is p.POSITIONAL_ONLY]
    meant = {target: source for source, target in plan.items() if target}
    needed = {
        p.name: meant.get(p.name, p.name)
        for p in theirs.parameters.values()
        if p.default is _EMPTY and p.kind in (*_POSITIONAL, p.KEYWORD_ONLY)
    }
    keyword = next((p.name for p in ours.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    rest = next((p.name for p in ours.parameters.values() if p.kind is p.VAR_POSITIONAL), None)

    def call(*args: Any, **kwargs: Any) -> Any:
        first, args = args[:skip], args[skip:]
        arguments = bind(*args, **kwargs).arguments
        more = arguments.pop(rest, ()) if rest else ()
        given = dict(arguments.pop(keyword, {})) if keyword else {}
        inside: Any = None
        for parameter, value in arguments.items():
            target = plan[parameter]
            if target is not None:
                given[target] = devices.real(value)
            elif parameter in HINT_ARGUMENTS or _is_default(value, defaults[parameter]):
                continue
            elif parameter == "device":
                inside = value
            else:
                call_form = f"torch.cuda.{name}({parameter}={value!r})"
                raise UnsupportedError(call_form, label, "leave that argument at its default")
        for target, source in needed.items():
            if target not in given:
                given[target] = _fill(devices, name, label, target, defaults.get(source, _EMPTY))
        positional = [given.pop(parameter) for parameter in only if parameter in given]
        if inside is None:
            return vendor(*first, *positional, *more, **given)
        with torch.cuda.device(inside):
            return vendor(*first, *positional, *more, **given)

    return call


def _takes_anything(signature: inspect.Signature) -> bool:
    return {p.kind for p in signature.parameters.values()} == {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }


def _without(signature: inspect.Signature, count: int) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[count:]) if count else signature


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)


def _fill(devices: Devices, name: str, label: str, parameter: str, default: Any) -> Any:
    """What a vendor demands and CUDA leaves out: the current device, or CUDA's own default."""
    if "device" in parameter:
        return int(torch.cuda.current_device())
    if default is not _EMPTY:
        return default
    raise UnsupportedError(f"torch.cuda.{name}", label, f"the vendor's own call, which wants {parameter!r}")
