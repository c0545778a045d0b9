"""Checkpoints that are whole or absent: written aside, flushed to disk, then renamed into place."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

NAME = re.compile(r"checkpoint_(\d+)\.pt")


class CheckpointError(ValueError):
    """A checkpoint is missing or does not fit; the message says which and what to do."""


def save(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint named after ``state["iteration"]`` and remove all but the newest ``keep``."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"checkpoint_{state['iteration']:07d}.pt"
    scratch = folder / f".{target.name}.{os.getpid()}"
    try:
        with scratch.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    _flush_folder(folder)
    for old in found(folder)[:-keep]:
        old.unlink()
    for left in folder.glob(".checkpoint_*"):  # of a process that was killed while writing
        left.unlink(missing_ok=True)
    return target


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(p for p in folder.glob("checkpoint_*.pt") if NAME.fullmatch(p.name))


def load_latest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read, or None."""
    for path in reversed(found(folder)):
        try:
            return path, load(path)
        except Exception:  # a damaged disk or a copy cut short: the one before may be whole
            continue
    return None


def load(path: Path) -> dict[str, Any]:
    """A checkpoint, on the CPU; nothing in it can run code."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
