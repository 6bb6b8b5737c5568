"""Score one layer: pick the backend, check the tensors, accumulate into the plan."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.cpu_moments import score_layer_cpu
from cb_kernels.cpu_native import score_layer_native, takes_natively
from cb_kernels.plan import ScoringPlan


def score_layer(plan: ScoringPlan, layer: int, q: Tensor, k_pool: Tensor, lse: Tensor, *, scale: float) -> None:
    """Accumulate one scored layer into ``plan``. No host sync.

    ``layer`` counts scored layers: 0, 1, .. ``plan.layers - 1``, each once, in order. ``q`` [N, H, D] holds
    the batch's post-RoPE queries, unscaled; ``k_pool`` [slots, Hkv, D] the paged keys; ``lse`` float32 [N, H]
    the natural-log log-sum-exp of ``scale * q.k`` over everything each row sees (sender and own keys).

    Raises ``ScoringInputError`` if the tensors do not fit the plan.
    """
    plan.check_layer(layer, q, k_pool, lse)
    if plan.backend == "triton" or (plan.backend == "auto" and plan.device.type == "cuda"):
        # Imported here so that a machine without Triton can still score on the CPU.
        from cb_kernels.triton_moments import score_layer_triton

        score_layer_triton(plan, layer, q, k_pool, lse, scale=scale)
    elif takes_natively(plan, k_pool):
        score_layer_native(plan, layer, q, k_pool, lse, scale=scale)
    else:
        score_layer_cpu(plan, layer, q, k_pool, lse, scale=scale)
