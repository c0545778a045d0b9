"""Finds the accelerators of this machine and chooses exactly one, or says why it cannot."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass

from ditorch.backend import Backend
from ditorch.backends import BUILTIN
from ditorch_common.environment import CUDA_VISIBLE, STEERING, translated
from ditorch_common.settings import DITORCH

ENTRY_POINT_GROUP = "ditorch.backends"
DEVICE_VARIABLE = "DITORCH_DEVICE"
MAPPED: dict[str, set[str]] = {}
"""Backend name -> the variables that were set for it from CUDA's."""


class NoBackendError(RuntimeError):
    """No accelerator, or more than one, could be chosen; the message lists what was found.

    Example::

        try:
            ditorch.activate("ascend")
        except ditorch.NoBackendError as error:
            print(error)
    """


@dataclass(frozen=True)
class Candidate:
    """One backend that was looked at, and the outcome."""

    backend: Backend
    usable: bool
    reason: str


def known_backends() -> dict[str, Backend]:
    """All backends by name: those of ditorch, then those that other packages bring by entry point.

    Example: ``"ascend" in known_backends()``
    """
    found = {backend.name: backend for backend in BUILTIN}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        value = point.load()
        backend = value if isinstance(value, Backend) else value()
        if not isinstance(backend, Backend):
            raise TypeError(
                f"entry point {point.name} = {point.value} of group {ENTRY_POINT_GROUP} gave "
                f"{type(backend).__name__}, expected ditorch.Backend or a function that returns one"
            )
        if backend.name in found:
            raise ValueError(
                f"two backends are called {backend.name!r}: entry point {point.value} must use another name"
            )
        found[backend.name] = backend
    return found


def candidates(skip_building: bool = False) -> list[Candidate]:
    """Look at every known backend; vendor packages that are not installed are not imported.

    Example: ``[c.backend.name for c in candidates() if c.usable]``
    """
    return [
        Candidate(backend, False, "not looked at: it would be built")
        if skip_building and backend.name == "soft"
        else _look_at(backend)
        for backend in known_backends().values()
    ]


def choose(request: str | None = None) -> Backend:
    """The one backend to use: ``request``, else ``DITORCH_DEVICE``, else the only accelerator here.

    Example: ``choose("cpu").device_type == "cpu"``
    """
    request = request or DITORCH.read(DEVICE_VARIABLE) or None
    return _choose_named(request) if request else _choose_only()


def map_environment(backend: Backend) -> set[str]:
    """Set the backend's own variables from CUDA's; returns those that were not set before.

    Example: ``CUDA_VISIBLE_DEVICES=1,0`` sets ``ASCEND_RT_VISIBLE_DEVICES=0,1``
    """
    if backend.native:
        return set()
    found = translated(os.environ, backend.variables, backend.visible_devices_value)
    os.environ.update(found)
    return set(found)


def mapped_variables(backend: Backend) -> dict[str, str]:
    """CUDA's variables that are set -> the backend's variable that carries the value now.

    Example: ``{"CUDA_VISIBLE_DEVICES": "ASCEND_RT_VISIBLE_DEVICES"}``
    """
    pairs = {CUDA_VISIBLE: backend.visible_devices or "", **backend.variables.same}
    return {cuda: own for cuda, own in pairs.items() if cuda in os.environ and own in os.environ}


def without_effect(backend: Backend) -> dict[str, str]:
    """CUDA's variables that are set here and that the backend has no counterpart of, with the reason.

    Example: ``without_effect(backend)["CUDA_LAUNCH_BLOCKING"]``
    """
    if backend.native:
        return {}
    why = f"set, but {backend.name} has no variable of that meaning: no effect"
    return {name: why for name in STEERING if name in os.environ and name not in backend.variables.same}


def _look_at(backend: Backend) -> Candidate:
    # Vendors read their variables when their package is imported, so these have to be there before.
    added = map_environment(backend) if backend.installed() else set()
    outcome = _ask(backend)
    if outcome.usable:
        MAPPED.setdefault(backend.name, set()).update(added)
    else:
        for variable in added:
            del os.environ[variable]
    return outcome


def _ask(backend: Backend) -> Candidate:
    try:
        usable, reason = backend.usable()
    except Exception as error:
        usable, reason = False, f"{type(error).__name__}: {error}"
    return Candidate(backend, usable, reason)


def _choose_named(request: str) -> Backend:
    backends = known_backends()
    matches = [b for b in backends.values() if request in (b.name, b.device_type, b.package)]
    exact = [b for b in matches if b.name == request]
    if exact:
        matches = exact
    if not matches:
        raise NoBackendError(f"{DEVICE_VARIABLE}={request}: no such backend. Known: {', '.join(sorted(backends))}")
    outcomes = [_look_at(backend) for backend in matches]
    usable = [outcome for outcome in outcomes if outcome.usable]
    if len(usable) == 1:
        return usable[0].backend
    title = (
        f"{DEVICE_VARIABLE}={request}: cannot be used here"
        if not usable
        else f"{DEVICE_VARIABLE}={request}: fits more than one backend; use its name"
    )
    raise NoBackendError(_explain(title, outcomes))


def _choose_only() -> Backend:
    # Fallback devices are looked at last: probing `soft` may look for a compiler, which a machine
    # with an accelerator does not need.
    outcomes = [_look_at(b) for b in known_backends().values() if not b.fallback]
    usable = [outcome for outcome in outcomes if outcome.usable]
    if len(usable) == 1:
        return usable[0].backend
    if len(usable) > 1:
        names = ", ".join(outcome.backend.name for outcome in usable)
        title = f"more than one accelerator is usable: {names}. Choose with {DEVICE_VARIABLE}=<name>"
        raise NoBackendError(_explain(title, outcomes))
    for backend in known_backends().values():
        # The CPU is never chosen silently: code that asked for an accelerator should know it got none.
        if backend.fallback and backend.device_type != "cpu":
            outcome = _look_at(backend)
            outcomes.append(outcome)
            if outcome.usable:
                return backend
    title = f"no accelerator found. {DEVICE_VARIABLE}=cpu runs CUDA code on the CPU"
    raise NoBackendError(_explain(title, outcomes))


def _explain(title: str, outcomes: list[Candidate]) -> str:
    width = max((len(outcome.backend.name) for outcome in outcomes), default=0)
    lines = [f"  {o.backend.name:<{width}}  {'usable' if o.usable else 'not chosen'}: {o.reason}" for o in outcomes]
    return "\n".join([f"ditorch: {title}", *lines])
