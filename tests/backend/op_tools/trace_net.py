"""A small network whose program can be changed in one way, for traces that are compared."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """The network; `change` says in which way its program is another one (`Net("swapped")`)."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((16,), 2.0 if change == "buffer" else 1.0))
        self.change = change
        if change == "no bias":
            self.a.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change == "other order":
            q, k = self.a(self.b(x).relu()), self.b(x)
        else:
            q, k = self.a(x), self.b(x)
        q = F.dropout(q, 0.2, self.change == "dropout")
        q = q - q.mean(0 if self.change == "other dim" else 1, keepdim=True)
        one, two = k.chunk(2, -1)
        k = torch.cat([two * 2, one] if self.change == "exchanged" else [one * 2, two], -1)
        if self.change == "swapped":
            q, k = k, q
        y = q * torch.sigmoid(k) * self.scale
        if self.change == "inserted":
            y = y * 1.5
        if self.change == "nan":
            y = y / (y > 9)
        if self.change == "nothing":
            y = y * 1
        y = y.view(-1, 2, 8)
        if self.change != "transposed":
            y = y.transpose(1, 2)
        y = y.reshape(-1, 16)
        return F.relu(y) if self.change == "replaced" else F.gelu(y)
