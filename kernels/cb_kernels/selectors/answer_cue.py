"""The question's CacheBack score times what the row that would predict the answer looks at (ours).

The last row of the wrapped query ("Question: ... Answer:") is accumulated apart, in the same forward pass. Both are
measured with the attention sink left out, which otherwise wins the first span a place for nothing.
"""

from __future__ import annotations

from torch import Tensor

from cb_kernels.moments import cacheback_score, max_pool7
from cb_kernels.selectors.registry import Needs, SelectorContext, selector


@selector("answer_cue", needs=Needs.QUERY_AND_CUE_ROWS, sink_free_rows=True, options=("order", "alpha"))
def answer_cue(context: SelectorContext) -> Tensor:
    """``S * maxpool7(v_last)``: S as ``cacheback`` over the question's rows, v_last the votes of the cue row.

    Float32 [T]. Both sets of rows must have been accumulated with ``sink_free``.
    """
    options = context.options
    question = cacheback_score(context.require_moments(), order=options.order, alpha=options.alpha)
    return question * max_pool7(context.require_cue().votes)
