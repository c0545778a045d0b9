"""Plans of compiled graphs."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from op_tools.trace.compiled import _shape


def test_a_size_that_is_a_symbol_stays_one() -> None:
    """A symbol that is asked for its number becomes a constant, and the code is compiled anew for each size."""
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    with FakeTensorMode(shape_env=env):
        x = torch.empty(size, 3)
    shape = _shape(SimpleNamespace(meta={"val": x}))
    assert shape is not None
    assert shape[1] == 3
    assert isinstance(shape[0], str)
    assert not [guard for guard in env.guards if "Eq" in str(guard.expr)]
    assert _shape(SimpleNamespace(meta={"val": 3})) is None
