"""ParisKV's rerank: the candidates with the largest estimated inner products. Section 3.3 of the paper."""

from __future__ import annotations

from pariskv_kernels.rerank import estimate_scores

from pariskv.types import Codes, Query, Selection
from pariskv_plugins.keep import keep_best
from pariskv_plugins.paris.coarse import rotated_query


def best_candidates(query: Query, selection: Selection, codes: Codes, top_k: int) -> Selection:
    """The `top_k` best of the candidates by the estimate of the mean query's inner product with each key."""
    scores = estimate_scores(rotated_query(query), codes["codes"], codes["weights"], selection.indices)
    return keep_best(selection, scores, top_k)
