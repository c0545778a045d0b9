"""Worker processes are forks of one process that has imported what they need.

Importing PyTorch takes seconds of a core, and what the first probe imports takes as long again. The fork server does
that once, and the workers share the memory. It runs no backward pass itself: after one, PyTorch refuses them in forks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final, NoReturn

import torch

from ditorch_common.toolchain import cache_root

from .. import lifecycle, settings

_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# what tells a process that it is a rank: somebody's module that a worker imports must not join the training
_OF_A_RANK: Final = (
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
)
_PRELOADED: Final = ("sympy", "torch.fx.experimental.symbolic_shapes")  # by decompositions of operators, when first run


class Fork:
    """One worker process; its number is known once it has started."""

    def __init__(self) -> None:
        self.pid = 0
        self._handle = -1  # refers to this very process, also after its end
        self._unwanted = False

    def started(self, pid: int) -> None:
        """It runs, with this number."""
        self.pid = pid
        with contextlib.suppress(OSError):  # it has exited already
            self._handle = os.pidfd_open(pid)
        if self._unwanted:
            self.kill()

    def kill(self) -> None:
        """End it at once, or as soon as it has started (`fork.kill()`)."""
        self._unwanted = True
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def poll(self) -> int | None:
        """None while it runs (`fork.poll() is None`)."""
        return 0 if self._handle < 0 or select.select([self._handle], [], [], 0)[0] else None

    def wait(self) -> None:
        """Wait for its end, and let go of it (`fork.wait()`)."""
        if self._handle >= 0:
            select.select([self._handle], [], [])
            os.close(self._handle)
            self._handle = -1


class ForkServer:
    """The process that workers are forked from; it ends with `end()`, or with this process.

    >>> server = ForkServer()                             # doctest: +SKIP
    >>> worker = server.fork(theirs.fileno(), memory, size)  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                _command(theirs.fileno()),
                env={**_environment(), **dict.fromkeys(_ONE_THREAD, "1"), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    def fork(self, connection: int, memory: int, size: int, complete: bool = True) -> Fork:
        """A worker that answers on a socket and maps so many bytes of a file; its first message is its number.

        One that is not complete starts sooner, and imports what probes need when it does the first.
        """
        socket.send_fds(self._control, [f"{size} {int(complete)}".encode()], [connection, memory])
        return Fork()

    def end(self) -> None:
        """End it; workers that it has forked go on (`server.end()`)."""
        self.forget()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Close this side of the conversation (`server.forget()`)."""
        self._control.close()


def serve(control: int) -> NoReturn:
    """Fork a worker for each message, until the other side closes."""
    from . import worker

    lifecycle.leave_signals_to_parent()  # this process ends when the run does
    lifecycle.wait_for_children(False)
    torch.set_num_threads(1)
    conversation = socket.socket(fileno=control)
    while True:
        try:
            message, files, _, _ = socket.recv_fds(conversation, 64, 2)
        except OSError:
            message, files = b"", []
        if len(files) < 2:
            os._exit(0)
        size, complete = map(int, message.split())
        for name in _PRELOADED if complete else ():
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        if os.fork() == 0:
            conversation.close()
            lifecycle.wait_for_children(True)
            worker.main(files[0], files[1], size)
        for file in files:
            os.close(file)


def available() -> bool:
    """Whether processes can be told apart after their end, which forks of another process need (`available()`)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        return True
    except (AttributeError, OSError):  # an old kernel, or a sandbox that forbids it
        return False


def _environment() -> dict[str, str]:
    """That of the run; where PyTorch lies without compiled Python files, with a folder for them in the build cache.

    Compiling them takes two thirds of the time of `import torch`. Images for containers often leave them out.
    """
    found = {name: text for name, text in settings.environment().items() if not name.startswith(_OF_A_RANK)}
    compiled = getattr(torch.__spec__, "cached", None)
    if compiled is None or not os.path.exists(compiled):
        with contextlib.suppress(OSError):
            found["PYTHONPYCACHEPREFIX"] = str(cache_root(found) / "bytecode")
            found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def _command(control: int) -> list[str]:
    root = str(Path(__file__).resolve().parents[2])
    path = [root, *[p for p in sys.path if p and p != root]]
    main = f"from op_tools.compare.forkserver import serve; serve({control})"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {main}"]
