"""The two ways a caller can get this package wrong; both are ``ValueError``."""

from __future__ import annotations


class BudgetError(ValueError):
    """A budget that cannot be met: negative, or too small for the protected positions."""


class ScoringInputError(ValueError):
    """Tensors, lengths or options that do not describe a scoring problem."""
