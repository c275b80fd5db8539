"""Attention in torch: the decode step's `attend`, and for the prompt dense attention, at once or in parts.

Order everywhere: scale, soft-cap, bias, mask, softmax. Masking selects, it never multiplies by
zero, so that NaN in an unused slot does not get through.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pariskv.hookspecs import Register, Retriever, hookimpl
from pariskv.types import Partial, Query, Rows, Selected, WorkingSet

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a floating-point number of that many bytes."""

QUERY_BLOCK = 256
"""Queries at a time where the scores have to be written out."""


class TorchAttend(Retriever):
    """The `attend` that runs everywhere."""

    graph_safe = True

    @hookimpl
    def attend(self, query: Query, working: WorkingSet, selected: Selected | None) -> tuple[Tensor, Tensor]:
        return attend(query, working, selected)


@hookimpl
def register_retrievers(register: Register) -> None:
    register("torch", TorchAttend)


def attend(query: Query, working: WorkingSet, selected: Selected | None) -> tuple[Tensor, Tensor]:
    """One softmax over sink, ring and selected rows (and a selection's extra rows).

    returns out [B, H, G, D] in the queries' dtype, log-sum-exp [B, H, G] in float32 or float64
    """
    rows, valid = _rows_and_validity(working, selected)
    keys, values = rows[..., 0, :], rows[..., 1, :]
    scores = _scores(query, keys)
    if selected is not None and selected.bias is not None:
        scores[..., -selected.bias.shape[-1] :] += selected.bias
    scores.masked_fill_(~valid.unsqueeze(2), -math.inf)
    values = zero_where_unused(values, valid)
    if selected is not None and selected.extra is not None:
        scores, values = _with_extra(query, scores, values, selected.extra)
    out, lse = _softmax(scores, values)
    if selected is not None and selected.partial is not None:
        out, lse = merge(Partial(out, lse), selected.partial)
    return out.to(query.heads.dtype), lse


def zero_where_unused(values: Tensor, valid: Tensor) -> Tensor:
    """The values [..., M, D] where valid [..., M], else 0: a product with a weight of 0 would keep a NaN.

    An AND of the bits is this selection, and cheaper on a CPU than `where` with a mask that is broadcast.
    """
    bits = values.view(BITS[values.element_size()])
    return (bits & -valid.to(bits.dtype).unsqueeze(-1)).view(values.dtype)


def merge(one: Partial, other: Partial) -> tuple[Tensor, Tensor]:
    """Two attentions over disjoint rows as one, by log-sum-exp."""
    lse = torch.logaddexp(one.lse, other.lse.to(one.lse.dtype))
    weigh = [(part.lse - lse).exp().nan_to_num(0.0).unsqueeze(-1) * part.out for part in (one, other)]
    return weigh[0] + weigh[1], lse


def _rows_and_validity(working: WorkingSet, selected: Selected | None) -> tuple[Tensor, Tensor]:
    """The rows to look at [B, H, M, 2, D], and which of them hold a token, bool [B, H, M]."""
    batch, heads = working.rows.shape[:2]
    steady = working.steady.unsqueeze(1).expand(batch, heads, -1)
    if selected is None:
        return working.rows[:, :, : steady.shape[-1]], steady
    used = steady.shape[-1] + selected.valid.shape[-1]
    return working.rows[:, :, :used], torch.cat((steady, selected.valid), dim=-1)


def _scores(query: Query, keys: Tensor) -> Tensor:
    """Scaled, soft-capped q . k [B, H, G, M], float32 at least."""
    # Scaled before the product, which float16 could not hold otherwise.
    scores = torch.matmul(query.heads * query.scaling, keys.transpose(-1, -2))
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    return scores if query.softcap is None else torch.tanh(scores / query.softcap) * query.softcap


def _with_extra(query: Query, scores: Tensor, values: Tensor, extra: Rows) -> tuple[Tensor, Tensor]:
    unused = extra.bias == -math.inf
    more = (_scores(query, extra.keys) + extra.bias).masked_fill(unused, -math.inf)
    extra_values = zero_where_unused(extra.values, ~unused.all(dim=2))
    return torch.cat((scores, more), dim=-1), torch.cat((values, extra_values.to(values.dtype)), dim=2)


def _softmax(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted values [B, H, G, D] and log-sum-exp [B, H, G] of scores [B, H, G, M]; 0 and -inf of none."""
    limits = torch.finfo(scores.dtype)
    largest = scores.amax(dim=-1, keepdim=True).clamp(min=limits.min)
    weights = (scores - largest).exp()
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / total.clamp(min=limits.tiny)
    return torch.matmul(weights.to(values.dtype), values), (largest + total.log()).squeeze(-1)


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a prompt's chunk to everything so far, causal where there is no mask.

    query         [B, H * G, Q, D], the last Q of the n tokens
    keys, values  [B, H, n, D]
    mask          [B, 1, Q, n], bool (True: attend) or added to the scores
    sinks         [H * G], one more logit per head that has no value (gpt-oss)
    returns       [B, H * G, Q, D]
    """
    if softcap is not None or sinks is not None:
        found = _written_out(query, keys, values, mask, mask is None, scaling, softcap)
        return found.out if sinks is None else weaken_by_sinks(found.out, found.lse, sinks)
    num_queries, num_keys = query.shape[2], keys.shape[2]
    is_causal = mask is None and num_queries == num_keys and num_queries > 1
    if mask is None and 1 < num_queries < num_keys:
        mask = causal_lower_right(num_queries, num_keys)
    return scaled_dot_product_attention(
        query, keys, values, mask, is_causal=is_causal, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1]
    )


def partial_attention(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None = None, is_causal: bool = False
) -> Partial:
    """Attention of a chunk to a part of what it may see, to be merged with the other parts.

    query         [B, H * G, Q, D]
    keys, values  [B, H, n, D]; where is_causal the queries are the last Q of the n tokens, else all of them are seen
    returns       out [B, H * G, Q, D] and log-sum-exp [B, H * G, Q] in float32 or float64

    On a CUDA device flash attention does it, where it can; elsewhere the definition, in float32 at least.
    """
    if softcap is None and _flash_takes(query, keys, values):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(query, keys, values, is_causal=is_causal, scale=scaling)  # causal: aligned at the end
        return Partial(out, lse)
    if query.element_size() == 2:
        query, keys, values = query.float(), keys.float(), values.float()
    return _written_out(query, keys, values, None, is_causal, scaling, softcap)


def _flash_takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    if not query.is_cuda or query.shape[-1] % 8:
        return False
    return can_use_flash_attention(SDPAParams(query, keys, values, None, 0.0, False, True))


def _written_out(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scaling: float,
    softcap: float | None,
) -> Partial:
    """Attention of a chunk where no fused kernel does it: blocks of queries against all keys."""
    batch, num_heads, num_queries, head_dim = query.shape
    heads = keys.shape[1]
    group = num_heads // heads
    out, lse = torch.empty_like(query), []
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        block = query[:, :, start:stop].reshape(batch, heads, group * (stop - start), head_dim)
        scores = _scores(Query(block, None, scaling, softcap), keys).view(batch, num_heads, stop - start, -1)
        scores = _masked(scores, mask, is_causal, start, num_queries)
        flat = scores.view(batch, heads, group * (stop - start), -1)
        result, block_lse = _softmax(flat, values)
        out[:, :, start:stop] = result.view(batch, num_heads, stop - start, head_dim)
        lse.append(block_lse.view(batch, num_heads, stop - start))
    return Partial(out, torch.cat(lse, dim=2))


def weaken_by_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention as if each head had one more logit without a value (gpt-oss).

    out [B, heads, Q, D], lse [B, heads, Q], sinks [heads]
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1))
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _masked(scores: Tensor, mask: Tensor | None, is_causal: bool, start: int, num_queries: int) -> Tensor:
    """Scores [B, heads, q, n] of the queries from `start` on, with -inf where they may not look."""
    rows, num_keys = scores.shape[-2:]
    if is_causal:
        offset = num_keys - num_queries + start
        allowed = torch.ones(rows, num_keys, dtype=torch.bool, device=scores.device).tril(offset)
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is None:
        return scores
    part = mask[:, :, start : start + rows, :num_keys]
    return scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part
