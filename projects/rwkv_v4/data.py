"""Text as characters: vocabulary, cached ids, and batches that depend on the iteration alone."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import math
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ditorch_common.toolchain import cache_root

from .sample_text import sample_text

PLACES = ("data/enwik8.gz", "data/enwik8", "../data/enwik8.gz", "../shared/data/enwik8.gz")


class CorpusError(ValueError):
    """The text cannot be used; the message says which and why."""


def find_corpus(path: str | None = None) -> Path | None:
    """The corpus named by ``path`` or ``ENWIK8``, or one in the usual places; None where there is none.

    >>> find_corpus("no/such/file")
    Traceback (most recent call last):
    ...
    projects.rwkv_v4.data.CorpusError: no text at no/such/file (data.path or ENWIK8 names it)
    """
    named = path or os.environ.get("ENWIK8")
    if named:
        found = Path(named).expanduser()
        if not found.is_file():
            raise CorpusError(f"no text at {named} (data.path or ENWIK8 names it)")
        return found
    root = Path(__file__).parents[2]
    return next((p for base in (Path.cwd(), root) for p in (base / place for place in PLACES) if p.is_file()), None)


@dataclass
class CharCorpus:
    """A text as ids of its characters, in three parts: the first for training, two ends for validation and test.

    ``path=None`` looks for a corpus and, if there is none, uses the small text that comes with the project;
    ``path="sample"`` asks for that text. ``same_slice`` gives every sample the same characters, as the logged run did.

    >>> corpus = CharCorpus("sample")
    >>> corpus.text_of(corpus.ids[:8])
    '== 0 ==\\n'
    """

    path: str | None = None
    ctx_len: int = 1024
    same_slice: bool = False
    held_out: float = 0.05
    epoch_length: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 0.5:
            raise CorpusError(f"data.held_out={self.held_out}: expected a share from 0 to 0.5")
        source = None if self.path == "sample" else find_corpus(self.path)
        self.name = str(source) if source else "the bundled sample text"
        self.ids, self.vocabulary = _load(source)
        if len(self.split("train")) < self.ctx_len + 2:
            raise CorpusError(
                f"{self.name} has {len(self.ids)} characters, too few for contexts of {self.ctx_len}: "
                "use a longer text (data.path) or a shorter context (train.ctx_len)"
            )

    def __len__(self) -> int:
        """Samples of one epoch: ``epoch_length``, or as many as the training part holds side by side."""
        return self.epoch_length or (len(self.split("train")) - 1) // self.ctx_len

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def text_of(self, ids: np.ndarray) -> str:
        """The characters behind some ids."""
        return "".join(map(chr, self.vocabulary[ids]))

    def split(self, name: str) -> np.ndarray:
        """Ids of ``train``, ``valid`` or ``test``."""
        cut = len(self.ids) - 2 * int(self.held_out * len(self.ids))
        middle = cut + int(self.held_out * len(self.ids))
        return {"train": self.ids[:cut], "valid": self.ids[cut:middle], "test": self.ids[middle:]}[name]

    @cached_property
    def bytes_per_id(self) -> np.ndarray:
        """How many bytes of UTF-8 each character takes."""
        return np.array([len(chr(c).encode()) for c in self.vocabulary], dtype=np.int64)

    def sampler(self, device: torch.device | str, batch: int, seed: int) -> Sampler:
        """Training batches on a device."""
        return Sampler(torch.from_numpy(np.array(self.split("train"))).to(device), self, batch, seed)


@dataclass
class Sampler:
    """Batches of ``(inputs, targets)``: the same for an iteration whatever ran before it and on however many ranks."""

    ids: Tensor
    corpus: CharCorpus
    batch: int
    seed: int

    def __post_init__(self) -> None:
        self._steps = torch.arange(self.corpus.ctx_len + 1, device=self.ids.device)

    def __call__(self, iteration: int, first: int = 0, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples ``first`` to ``first + count`` of the global batch of an iteration."""
        offsets = self.offsets(iteration)[first : None if count is None else first + count]
        window = self.ids[offsets.to(self.ids.device, non_blocking=True)[:, None] + self._steps].long()
        return window[:, :-1], window[:, 1:]

    def offsets(self, iteration: int) -> Tensor:
        """Where the samples of an iteration start in the text."""
        if self.corpus.same_slice:
            return torch.ones(self.batch, dtype=torch.long)
        # Mixed by numpy: a torch generator on the CPU uses the low 32 bits of its seed only.
        mixed = np.random.SeedSequence([self.seed, iteration]).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        return torch.randint(len(self.ids) - self.corpus.ctx_len - 1, (self.batch,), generator=generator)


def windows(corpus: CharCorpus, split: str, batch: int, limit: int | None = None) -> list[np.ndarray]:
    """A part of the text in order, as batches of whole windows (batch, ctx_len + 1)."""
    ids, step = corpus.split(split), corpus.ctx_len
    count = (len(ids) - 1) // step
    if count < 1:
        raise CorpusError(
            f"the {split} part of {corpus.name} has {len(ids)} characters, less than one context of {step}"
        )
    starts = np.arange(count) * step
    batches = [starts[i : i + batch] for i in range(0, math.ceil(count / batch) * batch, batch)]
    return [ids[s[:, None] + np.arange(step + 1)] for s in batches[:limit]]


def _load(source: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and vocabulary (code points in order), from the cache where the same bytes were read before."""
    raw = source.read_bytes() if source else sample_text().encode()
    folder = cache_root() / "corpora" / hashlib.sha256(raw).hexdigest()[:24]
    if not (folder / "ids.npy").exists():
        ids, vocabulary = encode(_decoded(raw, source))
        try:
            _keep(folder, ids, vocabulary)
        except OSError:  # the cache is a convenience
            return ids, vocabulary
    return np.load(folder / "ids.npy", mmap_mode="r"), np.load(folder / "vocabulary.npy")


def encode(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the characters of a text, and the code point behind each id, in order.

    >>> [x.tolist() for x in encode("abca")]
    [[0, 1, 2, 0], [97, 98, 99]]
    """
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    if not len(points):
        raise CorpusError("the text is empty")
    seen = np.zeros(int(points.max()) + 1, dtype=bool)
    seen[points] = True
    vocabulary = np.flatnonzero(seen)
    rank = np.zeros(len(seen), dtype=np.int16 if len(vocabulary) < 2**15 else np.int32)
    rank[vocabulary] = np.arange(len(vocabulary))
    return rank[points], vocabulary


def _decoded(raw: bytes, source: Path | None) -> str:
    try:
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise CorpusError(f"{source} is not UTF-8 text, plain or gzipped: {error}") from error


def _keep(folder: Path, ids: np.ndarray, vocabulary: np.ndarray) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        np.save(made / "vocabulary.npy", vocabulary)
        np.save(made / "ids.npy", ids)
        with contextlib.suppress(OSError):  # another process was first
            made.rename(folder)
