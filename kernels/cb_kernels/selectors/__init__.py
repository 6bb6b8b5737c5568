"""Selectors: one file and one registered function each, from what was measured to a score per sender position.

To add one: write ``my_rule.py`` with a function ``(context: SelectorContext) -> Tensor [T]``, decorate it with
``@selector("my_rule")``, and import it at the end of this file. The keep law (cb_kernels.keep) is the same for all.
"""

from __future__ import annotations

from cb_kernels.selectors.registry import Selector, SelectorContext, get, names, selector

__all__ = ["Selector", "SelectorContext", "get", "names", "selector"]

from cb_kernels.selectors import cacheback, mean_query  # noqa: F401  (importing registers)
