"""The definition of `attend_rows`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pariskv_kernels.attend.other import Other, asked


def attend_rows(
    heads: Tensor,
    rows: Tensor,
    steady: Tensor,
    valid: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    other: Other | None = None,
) -> tuple[Tensor, Tensor]:
    """Everything in float32, or in float64 where the heads are."""
    wide = torch.promote_types(heads.dtype, torch.float32)
    used = steady.unsqueeze(1).expand(-1, heads.shape[1], -1)
    if valid is not None:
        used = torch.cat((used, valid), dim=-1)
    keys, values = rows[:, :, : used.shape[-1]].to(wide).unbind(3)
    scores = heads.to(wide) @ keys.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores[..., steady.shape[1] :] += bias
    scores = scores.masked_fill(~used.unsqueeze(2), -math.inf)
    lse = scores.logsumexp(-1)
    # No row in use: every weight is exp(-inf), 0, instead of exp(-inf - -inf).
    weights = (scores - lse.clamp(min=torch.finfo(wide).min).unsqueeze(-1)).exp()
    out = weights @ values.masked_fill(~used.unsqueeze(-1), 0)
    if other is not None:
        (other_out, other_lse), own = asked(other, heads), lse
        lse = torch.logaddexp(own, other_lse)
        share = (own - lse.clamp(min=torch.finfo(wide).min)).exp().unsqueeze(-1)
        out = share * out + (1 - share) * other_out.where(other_lse.unsqueeze(-1) > -math.inf, 0)
    return out.to(heads.dtype), lse
