"""Selectors: one file and one registered function each, from what was measured to a score per sender position.

To add one: write ``my_rule.py`` with a function ``(context: SelectorContext) -> Tensor [T]``, decorate it with
``@selector("my_rule", needs=...)``, and import it at the end of this file. ``Needs`` says what may be measured first.
The registry pins position 0 (unless sink-free), and the keep law (cb_kernels.keep) cuts; both are the same for all.
"""

from __future__ import annotations

from cb_kernels.selectors.options import SelectorOptions
from cb_kernels.selectors.registry import (
    Needs,
    Selector,
    SelectorContext,
    SelectorEntry,
    get,
    load,
    names,
    selector,
)

__all__ = [
    "Needs",
    "Selector",
    "SelectorContext",
    "SelectorEntry",
    "SelectorOptions",
    "get",
    "load",
    "names",
    "selector",
]

from cb_kernels.selectors import (  # noqa: F401  (importing registers)
    answer_cue,
    bm25,
    cacheback,
    chunkkv,
    h2o,
    kvzip,
    mean_query,
    random,
    snapkv,
    streaming_llm,
)
