"""Every public name of `payload.torch`, used as a caller would: mypy reads this, nothing runs it.

Where torch is not installed its types are unknown; `make torch-test` reads it with them.
"""

from typing import assert_type

import numpy as np
import torch

import payload.torch as pt
from payload import Ragged, Resolver, Segment


def use(resolver: Resolver, segments: list[Segment], mask: Ragged) -> None:
    assert_type(pt.view(resolver, segments[0]), torch.Tensor)
    assert_type(pt.as_tensor(np.zeros(3)), torch.Tensor)
    window = pt.window(
        resolver, segments, "routed_experts", 0, 9, fill=0, holes=[(8, 9)], extent=(0, 9),
        dtype=torch.int32, layers=[3, 4], num_layers=61, pin_memory=True,
    )  # fmt: skip
    assert_type(window, torch.Tensor | None)
    out = torch.empty(9, 2, 8, dtype=torch.uint8)
    pt.window(resolver, segments, "routed_experts", np.int64(0), 9, dtype="field", out=out)
    assert_type(pt.as_index(out), torch.Tensor)
    assert_type(pt.as_index(out, torch.int32), torch.Tensor)
    assert_type(pt.as_nested(mask), torch.Tensor)
    assert_type(pt.as_padded(mask, -1, width=9), torch.Tensor)
