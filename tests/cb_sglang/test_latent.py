"""The rescaling of latent rows: against the golden rollout, and where it could go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cb_sglang.seam.latent import latent_row

GOLDEN = Path(__file__).parent.parent / "golden" / "latent.safetensors"


@pytest.mark.parametrize("rollout", ["plain", "conditioned"])
def test_golden_rows(rollout: str) -> None:
    with safe_open(GOLDEN, "pt") as golden:
        norm = float(golden.get_tensor("target_norm"))
        assert norm == pytest.approx(float(golden.get_tensor("embedding_weight").norm(dim=1).mean()), rel=1e-6)
        hidden, expected = (golden.get_tensor(f"{rollout}.{name}") for name in ("hidden", "thoughts"))
    rows = torch.stack([latent_row(row, norm) for row in hidden])
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)


def test_a_row_has_the_norm_that_is_asked_for() -> None:
    row = latent_row(torch.tensor([3.0, 4.0]), 10.0)
    assert row.tolist() == pytest.approx([6.0, 8.0])
    assert latent_row(torch.tensor([3.0, 4.0], dtype=torch.bfloat16), 10.0).dtype == torch.bfloat16


def test_a_zero_row_stays_finite() -> None:
    assert latent_row(torch.zeros(4), 7.0).tolist() == [0.0] * 4
