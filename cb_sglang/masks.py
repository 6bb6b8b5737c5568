"""Runs of positions as masks on a device, for the keep law."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cb_sglang.runs import Runs


def run_masks(runs: Sequence[Runs], length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [len(runs), length]: True within each row's half-open runs. One copy to the device."""
    # Up at every start, down at every stop, then a running sum.
    borders = torch.zeros(len(runs), length + 1, dtype=torch.int32)
    for row, each in enumerate(runs):
        for start, stop in each:
            borders[row, start] += 1
            borders[row, stop] -= 1
    return (borders.cumsum(dim=1)[:, :-1] > 0).to(device)
