"""The model's input embeddings: looked up, and rolled on as latent rows (design section 2; paper section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cb_sglang.errors import InvalidRequestError, SeamError
from cb_sglang.spec import EmbeddingSpec, LatentSpec

_BLOCK = 8_192


@dataclass(slots=True)
class EmbeddingTable:
    """The embeddings as the runner feeds them: what SGLang puts under an override (model_runner.py)."""

    layer: Any
    vocab_size: int
    device: torch.device
    _mean_norm: float | None = None

    @classmethod
    def of(cls, runner: Any) -> EmbeddingTable:
        """Made once per runner and kept on it. Raises SeamError when the model does not show its embeddings."""
        if not hasattr(runner, "cacheback_embeddings"):
            if not hasattr(runner.model, "get_input_embeddings"):
                raise SeamError("this model does not show its input embeddings; use the encodings token_ids or text")
            device = runner.req_to_token_pool.req_to_token.device
            layer, vocab_size = runner.model.get_input_embeddings(), runner.model_config.vocab_size
            runner.cacheback_embeddings = cls(layer, vocab_size, device)
        found: EmbeddingTable = runner.cacheback_embeddings
        return found

    def rows(self, token_ids: list[int]) -> torch.Tensor:
        """[n, hidden] in the model's dtype. Raises InvalidRequestError for an id beyond the vocabulary."""
        if max(token_ids) >= self.vocab_size:
            raise InvalidRequestError(f"token id {max(token_ids)} is not in the vocabulary of {self.vocab_size}")
        looked_up: torch.Tensor = self.layer(torch.tensor(token_ids, device=self.device))
        return looked_up

    @property
    def mean_norm(self) -> float:
        """The mean Euclidean norm over the vocabulary; the scale of a latent row."""
        if self._mean_norm is None:
            total = 0.0
            for start in range(0, self.vocab_size, _BLOCK):
                block = self.rows(list(range(start, min(start + _BLOCK, self.vocab_size))))
                total += float(block.double().norm(dim=1).sum())
            self._mean_norm = total / self.vocab_size
        return self._mean_norm


def row_result(runner: Any, spec: LatentSpec | EmbeddingSpec, hidden: torch.Tensor | None) -> dict[str, Any]:
    """Rows as bytes. ``hidden`` [hidden_size] is the final-normed hidden row that a LatentSpec rolls on from."""
    table = EmbeddingTable.of(runner)
    if isinstance(spec, EmbeddingSpec):
        rows = table.rows(spec.token_ids)
    elif hidden is None:
        raise SeamError("SGLang returned no hidden row for a latent step")
    else:
        rows = latent_row(hidden, table.mean_norm)[None]
    rows = rows.contiguous().cpu()
    return {
        "rows": rows.view(torch.uint8).numpy().tobytes(),
        "dtype": str(rows.dtype).removeprefix("torch."),
        "hidden": rows.shape[1],
    }


def latent_row(hidden: torch.Tensor, target_norm: float) -> torch.Tensor:
    """The hidden row [hidden_size], rescaled to ``target_norm``; same dtype."""
    wide = hidden.float()
    scaled: torch.Tensor = wide / wide.norm().clamp_min(1e-6) * target_norm
    return scaled.to(hidden.dtype)
