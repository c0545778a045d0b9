"""The worker process: answers requests that come through a pipe, one case after the other.

It is started by a slot, which watches it: this process may hang, crash or be killed at any time. Messages are JSON,
length-prefixed by ``multiprocessing.connection``: ``{"do": "list"}`` and ``{"do": "unit"}`` come in; ``started``,
``result``, ``listed``, ``idle``, ``lost`` and ``failed`` go out.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from ditorch.conformance.cases import ERROR, NOT_COMPARABLE, Case, Limits, Result, Unit

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Checks(Protocol):
    """What answers the checks of a unit."""

    def run(self, check: str) -> Result:
        """Do one check."""
        ...


class Answers:
    """Turns requests into messages; state that lasts from one request to the next is the device only.

    Example: ``Answers(pipe, {"device": "cpu", "mode": "plain", "samples": None, "timeout": 60}).serve()``
    """

    def __init__(self, pipe: Connection, settings: dict[str, Any]) -> None:
        self.pipe = pipe
        self.device: str = settings["device"]
        self.api = settings["mode"] == "api"
        self.limits = Limits(settings["samples"], settings["timeout"])
        self._hunt_seconds: float | None = settings.get("hunt_seconds")
        if torch.device(self.device).type == "cuda":
            # The verdict is on float32, not on TF32. Set before the databases freeze these flags.
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False

    def serve(self) -> None:
        """Answer until the other end closes the pipe."""
        self.prepare()
        self.send(idle=True)
        while True:
            request = json.loads(self.pipe.recv_bytes())
            if request["do"] == "list":
                self.send(listed=self.listed(request["what"]), device_name=self.device_name())
            else:
                unit = Unit(request["what"], request["name"], request["dtype"], tuple(request["checks"]))
                if not self.unit(unit):
                    return
            self.send(idle=True)

    def prepare(self) -> None:
        """Load whatever takes time before the clock of the first case starts: databases, verdict, the device."""
        torch.empty(1).to(self.device).cpu()
        if self.api:
            from ditorch.conformance import api_checks  # noqa: F401

            return
        from ditorch.conformance import databases
        from ditorch.conformance.trial import Trial

        for database in (databases.operators, databases.modules, databases.optimizers):
            database()
        # On the CPU, whatever may be wrong with the device: the verdict imports PyTorch's decompositions on first use.
        x = torch.linspace(-1, 1, 12).reshape(3, 4).bfloat16().requires_grad_()
        Trial("torch.softmax", torch.softmax, (x, 1), {}, "cpu").run(backward=True)

    def send(self, **message: Any) -> None:
        """Send one message (`answers.send(idle=True)`)."""
        self.pipe.send_bytes(json.dumps(message, default=str).encode())

    def listed(self, what: list[str]) -> list[list[Any]]:
        """All units of some parts, as plain lists (`answers.listed(["ops"])`)."""
        if self.api:
            from ditorch.conformance import api_checks

            found = api_checks.units()
        else:
            from ditorch.conformance import databases

            found = databases.units(what, torch.device(self.device).type)
        return [[unit.what, unit.name, unit.dtype, list(unit.checks)] for unit in found]

    def device_name(self) -> str:
        """What the vendor calls the device, or its type (`answers.device_name()`)."""
        device = torch.device(self.device)
        try:
            return str(torch.get_device_module(device.type).get_device_name(device.index or 0))
        except Exception:  # there is no such question for the CPU and for some vendors
            return device.type

    def unit(self, unit: Unit) -> bool:
        """Run all checks of a unit; False when this process can no longer use the device."""
        from ditorch.conformance.coverage import OBSERVER
        from ditorch.conformance.trial import DeviceLost

        try:
            checks = self.checks(unit)
        except Exception as error:  # not in this version's database
            for case in unit.cases():
                self.send(started=case.check)
                self.send(result=Result(case, NOT_COMPARABLE, str(error)).as_dict())
            return True
        for check in unit.checks:
            self.send(started=check)
            case, started = Case(unit.what, unit.name, unit.dtype, check), time.monotonic()
            OBSERVER.begin(torch.device(self.device).type)
            try:
                result = checks.run(check)
            except DeviceLost as error:
                result = error.result or Result(case, ERROR, f"the device was lost: {error}")
                self.send(result=result.as_dict())
                self.send(lost=str(error))
                return False
            except Exception as error:
                from ditorch.conformance.trial import failed

                outcome = failed(error)
                result = Result(case, ERROR, f"outside of a sample: {outcome.message}", details=(outcome.details,))
            seconds = round(time.monotonic() - started, 4)
            self.send(result=replace(result, seconds=seconds, seen=OBSERVER.new()).as_dict())
        return True

    def checks(self, unit: Unit) -> Checks:
        """What answers this unit (`answers.checks(unit).run("forward")`)."""
        if unit.what == "api":
            from ditorch.conformance.api_checks import ApiChecks

            return ApiChecks(unit, self.device, self.limits)
        if unit.what == "modules":
            from ditorch.conformance.module_checks import ModuleChecks

            return ModuleChecks(unit, self.device, self.limits)
        if unit.what == "optimizers":
            from ditorch.conformance.optimizer_checks import OptimizerChecks

            return OptimizerChecks(unit, self.device, self.limits)
        if unit.what == "hunt":
            from ditorch.conformance.hunt_checks import HuntChecks, seconds_of_a_round

            if self._hunt_seconds is not None:
                share = seconds_of_a_round(torch.device(self.device).type, self._hunt_seconds)
                self.limits, self._hunt_seconds = replace(self.limits, hunt_seconds=share), None
            return HuntChecks(unit, self.device, self.limits)
        from ditorch.conformance.op_checks import OperatorChecks

        return OperatorChecks(unit, self.device, self.limits)


def main() -> None:
    """Serve the pipe whose number and settings are on the command line.

    Example: ``python -m ditorch.conformance.worker 7 '{"device": "cpu", ...}'``
    """
    if sys.platform == "linux":  # also when this process hangs, and the parent was killed
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    torch.set_num_threads(1)
    try:
        try:
            Answers(pipe, json.loads(sys.argv[2])).serve()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # at once: what a device's libraries do at exit is not part of any case


if __name__ == "__main__":
    main()
