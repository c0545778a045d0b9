"""Functions that draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .registry import CPU, FUNCTIONS, FunctionFacts

# Compositions in Python, which have no schema that would say that they are random.
FUNCTIONS.register("dropout", FunctionFacts(draws=True, inplace_option=True, law="dropout"))
FUNCTIONS.register("dropout_", FunctionFacts(law="dropout"))
FUNCTIONS.register(
    "dropout1d dropout2d dropout3d", FunctionFacts(draws=True, inplace_option=True, law="channel dropout")
)
FUNCTIONS.register("feature_dropout feature_dropout_", FunctionFacts(law="channel dropout"))
FUNCTIONS.register("alpha_dropout", FunctionFacts(draws=True, inplace_option=True, law="alpha dropout"))
FUNCTIONS.register("alpha_dropout_", FunctionFacts(law="alpha dropout"))
FUNCTIONS.register("feature_alpha_dropout", FunctionFacts(draws=True, inplace_option=True, law="alpha channel dropout"))
FUNCTIONS.register("feature_alpha_dropout_", FunctionFacts(law="alpha channel dropout"))
FUNCTIONS.register("rrelu", FunctionFacts(draws=True, inplace_option=True))
FUNCTIONS.register("normal_ uniform_", FunctionFacts(draws=True, law="samples"))
FUNCTIONS.register("""
    fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices
    """, FunctionFacts(draws=True, bound_on=CPU))  # fmt: skip
FUNCTIONS.register("""
    gumbel_softmax kaiming_normal_ kaiming_uniform_ orthogonal_ pca_lowrank sparse_ svd_lowrank trunc_normal_
    xavier_normal_ xavier_uniform_
    """, FunctionFacts(draws=True))  # fmt: skip
FUNCTIONS.register("""
    bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal poisson rand rand_like randint
    randint_like randn randn_like random_ randperm
    """, FunctionFacts(law="samples"))  # fmt: skip


def really_draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that may be random is so in this call: attention without dropout is not."""
    if "_fused_sdp_choice" in func._schema.name:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout", "train", "training"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            if value is False or (value == 0 and not argument.name.startswith("train")):
                return False
    return True
