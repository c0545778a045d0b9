"""Folders and files that other users cannot write, and files that are there once they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_O_TMPFILE: Final = getattr(os, "O_TMPFILE", 0) if os.path.isdir("/proc/self/fd") else 0

_MAX_LINKS: Final = 40  # as Linux has it


def _others_may_write(found: os.stat_result) -> bool:
    own_group = found.st_gid == os.getegid() == os.geteuid()  # a group of one, as many systems give each user
    return bool(found.st_mode & (stat.S_IWOTH if own_group else stat.S_IWOTH | stat.S_IWGRP))


def _is_mine(found: os.stat_result) -> bool:
    return found.st_uid in (os.geteuid(), 0)


def is_private(folder: Path) -> bool:
    """Whether nobody but this user and root can put anything into a folder, which need not be there yet.

    >>> is_private(Path("/"))
    True
    """
    try:
        path, met = _walked(folder)
    except OSError:
        return False
    for place, found in met:
        if not _is_mine(found):  # whoever owns a link can lead it elsewhere after this
            return False
        # in a sticky folder such as /tmp others cannot replace what is not theirs, but they can add to it
        is_safe = not _others_may_write(found) or (found.st_mode & stat.S_ISVTX and place != path)
        if not stat.S_ISLNK(found.st_mode) and not is_safe:
            return False
    return True


def _walked(folder: Path) -> tuple[Path, list[tuple[Path, os.stat_result]]]:
    """Where a path leads, and all that is met on the way, links included, as far as it is there."""
    root = Path("/")
    place, met, links = root, [(root, root.lstat())], 0
    rest = list(reversed(Path(os.path.abspath(folder)).parts[1:]))
    while rest:
        name = rest.pop()
        place = place.parent if name == ".." else place / name
        try:
            found = place.lstat()
        except FileNotFoundError:
            continue
        met.append((place, found))
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = Path(os.readlink(place))
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            place = root if target.is_absolute() else place.parent
    return place, met


def is_trusted(file: Path) -> bool:
    """Whether a file may be executed: a regular one of this user or root, which nobody else could have written."""
    try:
        found = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and _is_mine(found) and not _others_may_write(found) and is_private(file.parent)


def private_folder(wanted: Path | None, name: str, elsewhere: bool = True) -> Path:
    """The folder itself if it is private, else one for this user in it, else one in the temporary directory.

    Without `elsewhere` it is below `wanted`, or OSError.

    >>> private_folder(Path.home() / ".cache/ditorch", "ditorch")  # doctest: +SKIP
    """
    if wanted is not None and is_private(wanted):
        return wanted
    others = [wanted / f"user-{os.geteuid()}"] if wanted is not None else []
    others += [Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}"] if elsewhere else []
    for folder in others:
        with contextlib.suppress(OSError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not folder.is_symlink() and is_private(folder):
                return folder
    raise OSError(f"there is no folder that only this user can write ({wanted} is not); set DITORCH_CACHE_DIR to one")


@contextlib.contextmanager
def complete(path: str) -> Iterator[str]:
    """Where to write a file that appears once it is complete; a process that dies or a full disk leaves nothing.

    >>> with complete("report.csv") as place, open(place, "w") as file:  # doctest: +SKIP
    ...     file.write("a,b")
    """
    folder, slash, name = path.rpartition("/")
    partial = f"{folder}{slash}.{name}.{os.getpid()}.partial"
    nameless = _nameless(folder or slash or ".")
    try:
        if nameless < 0:
            yield partial
        else:
            yield f"/proc/self/fd/{nameless}"
            try:
                os.link(f"/proc/self/fd/{nameless}", path, src_dir_fd=nameless)
                return
            except FileExistsError:  # a link cannot take the place of another file, a rename can
                os.link(f"/proc/self/fd/{nameless}", partial, src_dir_fd=nameless)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    finally:
        if nameless >= 0:
            os.close(nameless)


def _nameless(folder: str) -> int:
    """A file without a name, which is gone if nobody gives it one; -1 where the system has none."""
    try:
        return os.open(folder, _O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666) if _O_TMPFILE else -1
    except OSError:
        return -1
