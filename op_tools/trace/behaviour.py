"""What comparing two runs must know of an operator, by its name: does it draw, jump, or round in several steps?"""

from __future__ import annotations

import functools
import inspect
import math
import re
from typing import Final, NamedTuple

import torch

from ..call.functions import overloads_of
from ..call.graphs import OP as COMPILED_CODE
from ..call.operators.registry import KERNELS, Kind, function_facts, last_name
from .families import family
from .graph import short_name

PRODUCTS: Final = frozenset({"matmul", "attention", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
                             "conv_transpose2d", "conv_transpose3d", "wkv", "bilinear"})  # fmt: skip
_RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell"})
_SEVERAL: Final = frozenset({"attention", "update", "wkv", "compile"}) | _RECURRENT
_STEEP: Final = frozenset({"div", "_foreach_div", "_foreach_addcdiv", "addcdiv", "rsqrt", "reciprocal", "log", "log2",
                           "log10", "update", "_foreach_sqrt", "sqrt", "norm", "truediv", "rtruediv", "vector_norm",
                           "normalize", "cosine_similarity", "atan2", "arctan2", "angle", "acos", "asin",
                           "logit"})  # fmt: skip
_EXPONENTIAL: Final = frozenset({"exp", "exp2", "expm1", "softmax", "sigmoid", "logsigmoid", "softplus", "tanh", "cosh",
                                 "sinh", "sin", "cos", "tan", "pow", "logsumexp", "logaddexp", "softmin", "erfc",
                                 "lgamma", "silu", "gelu", "mish"})  # fmt: skip
_JUMPS: Final = frozenset({"sign", "sgn", "floor", "ceil", "round", "trunc", "frac", "fix", "floor_divide", "fmod",
                           "remainder", "mod", "heaviside", "hardshrink", "threshold", "histc", "histogram",
                           "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine", "one_hot", "equal",
                           "nms", "unique", "nonzero", "masked_select", "grid_sample", "interpolate"})  # fmt: skip
# Whose gradient is a continuous function of what the operator got; that of others may jump, as that of relu does at 0.
_SMOOTH: Final = PRODUCTS | _SEVERAL | _STEEP | _EXPONENTIAL | frozenset(
    {"add", "mul", "sum", "view", "cast", "embedding", "loss", "layer_norm", "batch_norm", "group_norm", "rms_norm",
     "instance_norm", "cat", "stack", "pad", "index_select", "neg", "elu", "cumsum", "avg_pool1d", "avg_pool2d",
     "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "var", "std", "lerp", "addcmul",
     "erf", "outer", "mask", "fill", "roll", "flip", "unfold", "pixel_shuffle", "mse_loss", "kl_div",
     "sum_of_gradients"}
)  # fmt: skip
_COMPOUNDS: Final = frozenset({"prod", "cumprod"})  # differences of their factors add up
_NORMALIZES: Final = frozenset({"layer_norm", "rms_norm", "group_norm", "instance_norm", "normalize",
                                "cosine_similarity"})  # fmt: skip
_MATRICES: Final = frozenset({"inverse", "cholesky", "svd", "eigh", "eigvalsh", "qr", "solve", "lstsq", "pinv", "det",
                              "slogdet", "logdet", "matrix_exp", "matrix_power", "cholesky_solve", "cholesky_inverse",
                              "lu_solve", "solve_triangular", "eig", "eigvals", "svdvals", "cond", "inv"})  # fmt: skip
DREW: Final = "drew=True"  # ends the arguments of compiled code that took random numbers
_DROPS: Final = frozenset({"dropout_p", "dropout"})
_TRAINS: Final = frozenset({"training", "train"})
_NUMBER: Final = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
_HALF_ROUNDING: Final = 2.0**-7  # how far constants may be apart that two dtypes round, such as the least of each


class Behaviour(NamedTuple):
    """How an operator makes differences of its inputs larger, and what it may do differently in two right runs."""

    several: bool  # may store what is between its steps
    contracts: bool  # products of its inputs cancel
    steep: bool  # makes much of small differences near 0
    exponential: bool  # turns absolute differences of its largest argument into relative ones
    jumps: bool  # a difference as small as you like may move an element by all of its size
    jumps_backward: bool
    chooses: bool  # of equal values it may take any
    matrices: bool  # of a condition that the norms do not tell
    compounds: bool  # multiplies many numbers
    normalizes: bool  # rows that are small become as large as others
    free: bool  # what it returns is not determined, such as the sign of an eigenvector or what empty memory holds
    may_draw: bool  # random numbers, where its arguments do not say otherwise


@functools.lru_cache(maxsize=20_000)
def behaviour(name: str) -> Behaviour:
    """What is known of an operator (`behaviour("torch.nn.functional.relu").jumps_backward`)."""
    last, kind = short_name(name), family(name)
    facts = function_facts(name)
    words = {last, kind, last.removeprefix("_foreach_")}
    kernel = KERNELS.by_name.get(last) or KERNELS.by_name.get(f"linalg_{last}")
    return Behaviour(
        several=bool(words & _SEVERAL) or facts.cudnn or (kernel is not None and kernel.hidden_steps),
        contracts=kind in PRODUCTS,
        steep=bool(words & _STEEP),
        exponential=bool(words & _EXPONENTIAL),
        jumps=bool(words & _JUMPS) or (kernel is not None and kernel.jumps),
        jumps_backward=not words & _SMOOTH,
        chooses=facts.indices is not None or last in ("max_pool1d", "max_pool2d", "max_pool3d"),
        matrices=last in _MATRICES or (kernel is not None and kernel.kind == Kind.MATRIX),
        compounds=bool(words & _COMPOUNDS),
        normalizes=bool(words & _NORMALIZES),
        free=facts.uninitialised or bool(facts.free_vectors) or last.startswith(("empty", "new_empty")),
        may_draw=facts.draws or bool(facts.law) or _is_seeded(last_name(name)),
    )


@functools.cache
def _is_seeded(last: str) -> bool:
    return any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads_of(last))


@functools.lru_cache(maxsize=20_000)
def draws(name: str, arguments: str) -> bool:
    """Whether a call drew random numbers: `dropout` does not with `p=0.0`.

    >>> draws("torch.nn.functional.dropout", "_, 0.1, True, False"), draws("torch.nn.functional.dropout", "_, 0.0")
    (True, False)
    """
    if name == COMPILED_CODE:
        return arguments.endswith(DREW)
    if not behaviour(name).may_draw:
        return False
    places, asked = _parameters(name), False
    drops = _DROPS | {"p"} if function_facts(name).law.endswith("dropout") else _DROPS
    for place, word in enumerate(_split(arguments)):
        key, equal, value = word.partition("=")
        key = key if equal else places[place] if place < len(places) else ""
        value = value if equal else word
        if (key in drops and _is_zero(value)) or (key in _TRAINS and value == "False"):
            return False
        asked = asked or key in drops
    # what has such a parameter and did not get it took its default: attention and recurrent networks drop nothing
    return asked or "p" in drops or not drops.intersection(places)


@functools.cache
def _parameters(name: str) -> tuple[str, ...]:
    """The names of an operator's parameters, as far as PyTorch says."""
    last = last_name(name)
    function = getattr(torch.nn.functional, last, None) if name.startswith("torch.nn.functional.") else None
    if inspect.isfunction(function):
        return tuple(inspect.signature(function).parameters)
    overloads = overloads_of(last)
    return tuple(argument.name for argument in overloads[0]._schema.arguments) if overloads else ()


def _split(arguments: str) -> list[str]:
    """Words between commas outside of brackets (`_split("_, [1, 2], p=0.1") == ["_", "[1, 2]", "p=0.1"]`)."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(arguments):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            found.append(arguments[start:place].strip())
            start = place + 1
    return [*found, arguments[start:].strip()]


def _is_zero(text: str) -> bool:
    try:
        return float(text) == 0.0
    except ValueError:
        return False


@functools.lru_cache(maxsize=20_000)
def apart_in_arguments(first: str, second: str) -> float:
    """How far the numbers in the arguments of two calls are apart, relatively; infinite if these say something else.

    Constants that depend on the dtype, such as its least number, are as far apart as rounding makes them, or cannot be
    compared at all (NaN).

    >>> apart_in_arguments("_, -3.4028234663852886e+38", "_, -3.3895313892515355e+38") < 0.004
    True
    >>> apart_in_arguments("_, -3.4028234663852886e+38", "_, -65504.0")
    nan
    >>> apart_in_arguments("_, 1e-05", "_, 1e-06"), apart_in_arguments("_, 0.5", "_, 0.5")
    (inf, 0.0)
    """
    if first == second:
        return 0.0
    if _NUMBER.sub("#", first) != _NUMBER.sub("#", second):
        return math.inf
    most = 0.0
    for one, two in zip(_NUMBER.findall(first), _NUMBER.findall(second)):
        x, y = float(one), float(two)
        if x != y:
            apart = abs(x - y) / max(abs(x), abs(y)) if "." in one + two or "e" in one + two else math.inf
            most = max(most, math.nan if apart > _HALF_ROUNDING and _are_limits(x, y) else apart, key=_order)
    return most if most <= _HALF_ROUNDING or math.isnan(most) else math.inf


def _order(apart: float) -> float:
    return 1e300 if math.isnan(apart) else apart


def _are_limits(first: float, second: float) -> bool:
    """Whether two numbers are the same limit of two dtypes (`_are_limits(65504.0, torch.finfo(torch.float32).max)`)."""
    return any(first in limits and second in limits for limits in _limits())


@functools.cache
def _limits() -> tuple[frozenset[float], ...]:
    infos = [torch.finfo(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    return tuple(
        frozenset(sign * float(getattr(info, name)) for info in infos)
        for name, sign in (("min", 1), ("max", 1), ("eps", 1), ("tiny", 1), ("tiny", -1))
    )
