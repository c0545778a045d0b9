"""Sampled golden runs: a large call is judged at some thousand places of its results, by a call cut down to them.

`axes` has what a rule says of a call, `places` which places are chosen, `reduction` the cutting. The other modules are
the rules, one for each family of operators; a new one is a function with `@axes.rule(names)`. `trial` finds the axes of
operators that no rule knows.
"""

from .axes import Axes as Axes
from .axes import axes_of as axes_of
