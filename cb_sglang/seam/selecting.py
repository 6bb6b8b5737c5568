"""From moments to kept positions, for all queries that a forward pass has completed."""

from __future__ import annotations

from typing import Any

import torch

from cb_kernels import selectors
from cb_kernels.keep import coverage_budgets, keep_positions
from cb_kernels.selectors.spans import span_means
from cb_sglang.masks import run_masks
from cb_sglang.seam.task import CUE, VOTES, ScoringTask, selector_options
from cb_sglang.spec import SPAN, ScoringSpec


def select(tasks: list[ScoringTask]) -> None:
    """Score, cut with the keep law, and leave positions (and span scores on request) on each task.

    The whole batch is cut on the device; one copy brings it to the host.
    """
    if not tasks:
        return
    specs = [task.spec for task in tasks if isinstance(task.spec, ScoringSpec)]
    device = tasks[0].moments[VOTES].votes.device
    shape = (len(tasks), max(spec.sender_len for spec in specs))
    scores = torch.zeros(shape, device=device)
    for row, (task, spec) in enumerate(zip(tasks, specs, strict=True)):
        context = selectors.SelectorContext(
            length=spec.sender_len,
            latent_len=spec.latent_len,
            options=selector_options(spec),
            moments=task.moments[VOTES],
            cue=task.moments.get(CUE),
        )
        scores[row, : spec.sender_len] = selectors.get(spec.selector)(context)
    lengths = torch.tensor([spec.sender_len for spec in specs], device=device)
    budgets = torch.tensor([spec.budget for spec in specs], device=device)
    protected = run_masks([spec.protected_runs for spec in specs], shape[1], device)
    excluded = run_masks([spec.excluded_runs for spec in specs], shape[1], device)
    if any(spec.coverage for spec in specs):
        coverage = torch.tensor([spec.coverage for spec in specs], device=device)
        found = coverage_budgets(scores, lengths, budgets, coverage, protected=protected, excluded=excluded, span=SPAN)
        budgets = torch.where(coverage > 0, found, budgets)
    kept = keep_positions(
        scores,
        lengths,
        budgets,
        max_budget=max(spec.budget for spec in specs),
        protected=protected,
        excluded=excluded,
        span=SPAN,
    )
    packed = torch.cat([kept.count[:, None].to(torch.int32), kept.positions], dim=1).cpu()
    for row, (task, spec) in enumerate(zip(tasks, specs, strict=True)):
        result: dict[str, Any] = {"positions": packed[row, 1 : 1 + int(packed[row, 0])].tolist()}
        if spec.want_scores:
            result["span_scores"] = span_means(scores[row, : spec.sender_len], SPAN).tolist()
        task.settle(result)
