"""Calls that PyTorch's samples leave out: other layouts, sizes, values and combinations of arguments, drawn by a seed.

For worker processes alone, like the databases that it starts from.
"""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from ditorch.conformance.op_checks import seed_everything
from op_tools.call.description import map_tensors, tensors_in

SIZES: Final = (
    *(1, 2, 3, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 127, 128, 129),
    *(255, 256, 257, 300, 511, 513, 600, 1000, 1023, 1025, 1100, 2049, 4097),
)
"""Both sides of the edges of tiles and of powers of two, and a few that are neither."""
MAX_ELEMENTS: Final = 1 << 17
_MOST: Final = (1 << 10, 1 << 10, 1 << 12, 1 << 12, 1 << 14, MAX_ELEMENTS)
"""How large a tensor becomes, one of these: large ones take most of the time, and small ones tell nearly all."""
_SCALES: Final = ((5, 10, 20), (1, 2, 3), (8, 16, 32), (9, 17, 33), (33, 40, 65), (12, 24, 48))  # S, M, L of PyTorch
_MODULES: Final = ("common_methods_invocations", "opinfo.core", "opinfo.definitions.linalg")
_MORE_SCALES: Final = 2
"""Sizes of samples in one round beside PyTorch's own: making them takes time."""
_MAX_SAMPLES: Final = 100
_FROM_FLOAT32: Final = frozenset({"float16", "bfloat16", "float64"})
_SHARES: Final = (0.2, 0.4, 0.6)
"""Of the possible changes, how many a variant has: few, which leaves a call that the CPU accepts, or many."""
_STRUCTURED: Final = (
    "linalg",
    "cholesky",
    "lu",
    "triangular",
    "ormqr",
    "geqrf",
    "svd",
    "qr",
    "inverse",
    "pinverse",
    "eig",
    "logdet",
    "slogdet",
    "det",
)


_TRUSTS_INDICES: Final = (
    *("nn.functional.embedding_bag", "nn.functional.ctc_loss", "segment_reduce", "_segment_reduce"),
    *("grid_sampler_2d", "grid_sampler_3d", "nn.functional.pdist"),
)
"""The CPU's own kernels of these do not check what they are given: they take the process down, or write nothing."""


@dataclass(frozen=True)
class Variant:
    """A call made of a sample, and what was changed in it.

    >>> Variant((torch.ones(2),), {}, ("input[0] transposed",)).told
    'input[0] transposed'
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    changes: tuple[str, ...] = ()
    sample: Any = field(default=None, compare=False)

    @property
    def told(self) -> str:
        """What was changed, in words."""
        return ", ".join(self.changes) or "as PyTorch has it"

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments, in order."""
        return list(tensors_in((self.args, self.kwargs)))

    def mapped(self, change: Callable[[int, torch.Tensor], torch.Tensor], *changes: str) -> Variant:
        """The same call on other tensors (`variant.mapped(lambda number, t: t.contiguous())`)."""
        numbers = itertools.count()
        args, kwargs = map_tensors((self.args, self.kwargs), lambda t: change(next(numbers), t))
        return replace(self, args=args, kwargs=kwargs, changes=(*self.changes, *changes))


class Samples:
    """PyTorch's samples of one operator at several sizes, each made once: the half types take those of float32.

    Making them is most of a hunt's time otherwise.

    Example: ``Samples(operators()["add"]).made((5, 10, 20), "bfloat16", grad=True)``
    """

    def __init__(self, info: Any) -> None:
        self._info = info
        self._made: dict[tuple[tuple[int, ...], str, bool], list[Variant]] = {}

    def made(self, scale: tuple[int, int, int], dtype: str, grad: bool) -> list[Variant]:
        """The samples of a size as variants without a change; none where they cannot be made.

        Those for other floating-point dtypes are in float32: `in_dtype` turns the one that is chosen.
        """
        key = (scale, dtype, grad)
        if key not in self._made:
            wide = self.made(scale, "float32", grad) if dtype in _FROM_FLOAT32 else []
            self._made[key] = wide or self._drawn(*key)
        return self._made[key]

    def _drawn(self, scale: tuple[int, int, int], dtype: str, grad: bool) -> list[Variant]:
        seed_everything()
        found: list[Variant] = []
        try:
            with _sizes_of_samples(scale):
                # Not by `sample_inputs`: it looks at the whole stack, and seeds every device for each sample.
                made = self._info.sample_inputs_func(self._info, "cpu", getattr(torch, dtype), grad)
                for sample in itertools.islice(made, _MAX_SAMPLES):
                    found.append(Variant((sample.input, *sample.args), dict(sample.kwargs), (), sample))
        except Exception:  # some samples hold for one size alone
            found = []
        return [v for v in found if all(t.numel() <= MAX_ELEMENTS for t in v.tensors)]


def in_dtype(variant: Variant, dtype: torch.dtype) -> Variant:
    """The same call with another floating-point dtype in place of float32 (`in_dtype(variant, torch.bfloat16)`)."""

    def change(number: int, t: torch.Tensor) -> torch.Tensor:
        if t.dtype is not torch.float32:
            return t
        return t.detach().to(dtype).requires_grad_(t.requires_grad)

    return variant.mapped(change)


class Variants:
    """Variants of the samples of one operator; the same seed gives the same ones.

    Example: ``next(Variants(operators()["nn.functional.avg_pool2d"], "float32", grad=True, seed="0").drawn())``
    """

    def __init__(self, info: Any, dtype: str, *, grad: bool, seed: str, samples: Samples | None = None) -> None:
        self._info, self._dtype, self._grad = info, dtype, grad
        self._random = random.Random(f"{seed}/{info.name}/{info.variant_test_name}/{dtype}/{grad}")
        self._samples = samples or Samples(info)
        self._trusting = info.name.startswith(_TRUSTS_INDICES)
        more = random.Random(f"{seed}/{info.name}").sample(_SCALES[1:], 0 if self._trusting else _MORE_SCALES)
        self._scales = [_SCALES[0], *more]  # indices are written for PyTorch's own size
        self._most = MAX_ELEMENTS
        by_singular_values = info.variant_test_name == "nuc"  # a norm without a gradient where one of them is zero
        # not any values and sizes will do
        self._structured = self._trusting or by_singular_values or info.name.startswith(_STRUCTURED)

    @classmethod
    def first(cls, info: Any, dtype: str) -> list[Variant]:
        """The first sample of an operator as PyTorch has it; none where it has none."""
        return Samples(info).made(_SCALES[0], dtype, grad=False)[:1]

    def drawn(self) -> Iterator[Variant]:
        """Variants without end; those of an operator without samples end at once."""
        steps: list[Callable[[Variant], Variant]] = [self._other_arguments, self._other_layout, self._other_layout]
        if self._trusting:
            steps = steps[1:]
        if not self._structured:
            steps += [self._other_numbers, self._other_size, self._other_size, self._one_or_none, self._other_values]
        while True:
            made = self._made(self._random.choice(self._scales)) or self._made(_SCALES[0])
            if not made:
                return
            variant = self._random.choice(made)
            if self._dtype in _FROM_FLOAT32:
                variant = in_dtype(variant, getattr(torch, self._dtype))
            share, self._most = self._random.choice(_SHARES), self._random.choice(_MOST)
            for step in steps:
                if self._random.random() < share:
                    variant = step(variant)
            if all(t.numel() <= MAX_ELEMENTS for t in variant.tensors):
                yield variant

    def _made(self, scale: tuple[int, int, int]) -> list[Variant]:
        return self._samples.made(scale, self._dtype, self._grad)

    # --- changes

    def _other_arguments(self, variant: Variant) -> Variant:
        """Some of the arguments of another sample: the database lists them, and does not cross them."""
        other = self._random.choice(self._made(_SCALES[0]) or [variant])
        args, kwargs, changes = list(variant.args), dict(variant.kwargs), []
        for key, value in other.kwargs.items():
            if not list(tensors_in((value, kwargs.get(key)))) and kwargs.get(key, ...) != value and self._toss():
                kwargs[key] = value
                changes.append(f"{key}={value!r:.40}")
        for number in range(1, min(len(args), len(other.args))):
            value = other.args[number]
            if not list(tensors_in((value, args[number]))) and type(value) is type(args[number]) and self._toss():
                args[number] = value
                changes.append(f"argument {number}: {value!r:.40}")
        return replace(variant, args=tuple(args), kwargs=kwargs, changes=(*variant.changes, *changes))

    def _other_numbers(self, variant: Variant) -> Variant:
        """One whole number, truth value or tuple of small numbers among the arguments gets another value."""
        args, kwargs = list(variant.args), dict(variant.kwargs)
        places: list[tuple[Any, Any]] = [(args, n) for n in range(1, len(args)) if _is_small(args[n])]
        places += [(kwargs, key) for key, value in kwargs.items() if _is_small(value)]
        if not places:
            return variant
        where, key = self._random.choice(places)
        where[key] = new = self._another(where[key])
        change = f"{key if where is kwargs else f'argument {key}'}: {new!r:.40}"
        return replace(variant, args=tuple(args), kwargs=kwargs, changes=(*variant.changes, change))

    def _another(self, value: Any) -> Any:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self._random.choice((0, 1, 2, 3, value - 1, value + 1, -1))
        return type(value)([self._another(0)] * len(value))

    def _other_layout(self, variant: Variant) -> Variant:
        tensors = [(n, t) for n, t in enumerate(variant.tensors) if t.layout is torch.strided and t.dim() and t.numel()]
        if self._trusting:  # indices keep their values and lie where the kernel thinks that they do
            tensors = [(n, t) for n, t in tensors if t.is_floating_point()]
        if not tensors:
            return variant
        # The first one is what most kernels read most of, and what calls in place write.
        chosen, tensor = tensors[0] if self._toss() else self._random.choice(tensors)
        fitting = [name for name, (fits, _) in LAYOUTS.items() if fits(tensor)]
        if self._structured:  # equal rows make a matrix singular, and rounding decides what comes of that
            fitting = [name for name in fitting if name != "expanded"]
        name = self._random.choice(fitting)
        numbers = {n for n, _ in tensors}
        everywhere = self._random.random() < 0.3  # all of them, as a network in channels_last has it

        def change(number: int, t: torch.Tensor) -> torch.Tensor:
            fits, make = LAYOUTS[name]
            if number != chosen and (not everywhere or number not in numbers):
                return t
            if not t.dim() or not fits(t):
                return t
            with torch.no_grad():
                return make(t.detach()).requires_grad_(t.requires_grad)

        return variant.mapped(change, f"{'all' if everywhere else f'tensor {chosen}'} {name}")

    def _other_size(self, variant: Variant) -> Variant:
        sizes = sorted({n for t in variant.tensors if t.layout is torch.strided for n in t.shape if n > 0})
        if not sizes:
            return variant
        old, new = self._random.choice(sizes), self._random.choice(SIZES)
        return resized(variant, old, new, self._random, self._most)

    def _one_or_none(self, variant: Variant) -> Variant:
        """Dimensions of one element, or of none: kernels of 1x1, broadcast, empty batches."""
        sizes = sorted({n for t in variant.tensors if t.layout is torch.strided for n in t.shape if n > 1})
        if not sizes:
            return variant
        return resized(variant, self._random.choice(sizes), int(self._random.random() > 0.2), self._random)

    def _other_values(self, variant: Variant) -> Variant:
        floating = [n for n, t in enumerate(variant.tensors) if _has_values(t)]
        if not floating:
            return variant
        chosen, name = self._random.choice(floating), self._random.choice(list(VALUES))
        generator = torch.Generator().manual_seed(self._random.randrange(1 << 30))

        def change(number: int, t: torch.Tensor) -> torch.Tensor:
            if number != chosen:
                return t
            with torch.no_grad():
                return VALUES[name](t.detach(), generator).requires_grad_(t.requires_grad)

        return variant.mapped(change, f"tensor {chosen} {name}")

    def _toss(self) -> bool:
        return self._random.random() < 0.5


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether other values can be made of a tensor's own: eight-bit numbers and sparse tensors know few kernels."""
    floating = tensor.dtype.is_floating_point and tensor.element_size() > 1
    return floating and tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type == "cpu"


def _is_small(value: Any) -> bool:
    """Whether an argument is a number of the kind that says how: a dimension, a stride, a padding; not a size."""
    if isinstance(value, (bool, int)):
        return -4 <= value <= 8
    return type(value) in (list, tuple) and bool(value) and all(type(v) is int and -4 <= v <= 4 for v in value)


def resized(
    variant: Variant, old: int, new: int, numbers: random.Random | None = None, most: int = MAX_ELEMENTS
) -> Variant:
    """Every dimension of one size gets another; a larger tensor has values of the smaller one, drawn again.

    A call that would have more than `most` elements in a tensor is left as it is.

    Example: ``resized(variant, 4, 1100)``
    """
    chosen = numbers or random.Random(0)
    generator = torch.Generator().manual_seed(chosen.randrange(1 << 30))
    if any(_grown(t, old, new) > max(most, t.numel()) for t in variant.tensors):
        return variant

    def change(number: int, t: torch.Tensor) -> torch.Tensor:
        if t.layout is not torch.strided or old not in t.shape or not t.numel():
            return t
        shape = [new if n == old else n for n in t.shape]
        with torch.no_grad():
            source = t.detach()
            if new <= old:
                for dim, n in enumerate(t.shape):
                    source = source.narrow(dim, 0, new) if n == old else source
                made = _laid_out_as(source.clone(memory_format=torch.contiguous_format), t)
            else:
                places = torch.randint(t.numel(), (torch.Size(shape).numel(),), generator=generator)
                made = _laid_out_as(source.reshape(-1)[places].reshape(shape), t)
            return made.requires_grad_(t.requires_grad)

    return variant.mapped(change, f"size {old} to {new}")


def _grown(tensor: torch.Tensor, old: int, new: int) -> int:
    return math.prod(new if n == old else n for n in tensor.shape)


def _laid_out_as(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    for name in ("channels_last", "transposed", "with heads before rows"):
        fits, make = LAYOUTS[name]
        if not like.is_contiguous() and fits(made) and fits(like) and make(like.detach()).stride() == like.stride():
            return make(made)
    return made


@contextmanager
def _sizes_of_samples(scale: tuple[int, int, int]) -> Iterator[None]:
    """PyTorch's functions make samples of the sizes S, M and L, which are names of their modules."""
    before: list[tuple[Any, str, Any]] = []
    for name in _MODULES:
        try:
            module = importlib.import_module(f"torch.testing._internal.{name}")
        except ImportError:
            continue
        for size, value in zip("SML", scale):
            if isinstance(getattr(module, size, None), int):
                before.append((module, size, getattr(module, size)))
                setattr(module, size, value)
    try:
        yield
    finally:
        for module, size, value in before:
            setattr(module, size, value)


# --- layouts and values -----------------------------------------------------------------------------------


def _transposed(t: torch.Tensor) -> torch.Tensor:
    order = list(reversed(range(t.dim())))
    return t.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def _rows_swapped(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(-3, -2).clone(memory_format=torch.contiguous_format).transpose(-3, -2)


def _with_offset(t: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(t.numel() + 3, dtype=t.dtype)
    wide[3:] = t.reshape(-1)
    return wide[3:].view(t.shape)


def _with_gaps(t: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*t.shape, 2), dtype=t.dtype)
    wide[..., 0] = t
    return wide[..., 0]


def _expanded(t: torch.Tensor) -> torch.Tensor:
    dim = max(range(t.dim()), key=lambda d: t.shape[d])
    return t.narrow(dim, 0, 1).clone(memory_format=torch.contiguous_format).expand(t.shape)


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)


def _has_two(t: torch.Tensor) -> bool:
    return t.dim() >= 2 and sum(n > 1 for n in t.shape) >= 2


LAYOUTS: Final[dict[str, tuple[Callable[[torch.Tensor], bool], Callable[[torch.Tensor], torch.Tensor]]]] = {
    "transposed": (_has_two, _transposed),
    "with heads before rows": (lambda t: t.dim() >= 3 and t.shape[-2] > 1 and t.shape[-3] > 1, _rows_swapped),
    "with an offset": (lambda t: True, _with_offset),
    "with gaps": (lambda t: True, _with_gaps),
    "expanded": (lambda t: max(t.shape) > 1, _expanded),
    "channels_last": (lambda t: t.dim() in (4, 5), _channels_last),
}
"""Name: which tensors can have it, and the same values in it (all equal along one dimension where expanded)."""


def _where(t: torch.Tensor, generator: torch.Generator, value: Any, share: float = 0.3) -> torch.Tensor:
    return torch.where(torch.rand(t.shape, generator=generator) < share, value, t)


VALUES: Final[dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]]] = {
    "all equal": lambda t, g: t.reshape(-1)[:1].expand(t.numel()).reshape(t.shape).clone(),
    "with signed zeros": lambda t, g: _where(t, g, torch.copysign(torch.zeros_like(t), t)),
    "not negative": lambda t, g: t.abs(),
    "tiny": lambda t, g: t * 2.0**-10,
    "large": lambda t, g: t * 2.0**5,
}
"""Name: other values for a tensor of floating-point numbers."""
