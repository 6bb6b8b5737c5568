"""BM25 of the query's words over the texts of the spans: what plain word matching finds, without any model.

Words are ``[^\\W_]+`` of the lowercased text: runs of letters and digits of any script. A word that a span's border
cuts in two counts as two other words. Scripts without spaces make one word of a whole run, so BM25 finds little there.
"""

from __future__ import annotations

import math
import re
from collections import Counter

import torch
from torch import Tensor

from cb_kernels.selectors.registry import Needs, SelectorContext, selector
from cb_kernels.selectors.spans import spread

WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """The lowercased words of a text."""
    return WORD.findall(text.lower())


@selector("bm25", needs=Needs.TEXT, options=())
def bm25(context: SelectorContext) -> Tensor:
    """The BM25 score of each span (k1 = 1.5, b = 0.75), the same for its positions; float32 [T].

    The inverse document frequency is Lucene's ``log(1 + (N - n + 0.5) / (n + 0.5))``, which stays positive for words
    that most spans hold.
    """
    # Not at the top: the kernels must import where there is only torch and Triton.
    from rank_bm25 import BM25Okapi  # type: ignore[import-untyped]

    query, span_texts = context.require_text()
    spans = [words(text) for text in span_texts]
    holders = Counter(word for span in spans for word in set(span))
    scores = torch.zeros(len(spans), device=context.device)
    if holders:
        index = BM25Okapi(spans)
        index.idf = {word: math.log(1 + (len(spans) - n + 0.5) / (n + 0.5)) for word, n in holders.items()}
        scores = torch.as_tensor(index.get_scores(words(query)), dtype=torch.float32, device=context.device)
    return spread(scores, context.length)
