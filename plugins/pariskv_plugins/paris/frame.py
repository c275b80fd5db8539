"""The frame in which `pariskv` encodes keys: what it learns from a prompt so that few bits say more.

Two things change no ranking, and how well codes describe keys very much:

    centre         q.(k - c) = q.k - q.c: one constant for a query, whatever c is. Keys crowd around their mean; the
                   directions of what is left without it spread over the sphere.
    precondition   q.k = (A^-T q).(A k) for every invertible A. Codes err alike in all directions, so an estimate's
                   squared error is about |A^-T q|^2 |A k|^2. With S the second moment of the queries and C that of
                   the (centred) keys, tr(A^-T S A^-1) tr(A C A^T) is least where A^T A is the geometric mean of C^-1
                   and S: C^-1/2 (C^1/2 S C^1/2)^1/2 C^-1/2. Then A k and A^-T q have the same second moment.

A follows from second moments alone, C of the zone's own keys, S of the model's queries on other texts (`pariskv
calibrate`), of the prompt's, or of both. The rotation of the paper comes after it.

A third is learnt from the last queries of the prompt: which of a group's heads look into the zone at all. A head that
attends to sink and ring only should have no say in what is proposed (`vote_combine: weighted_query`).

And of the values their mean and how they go with the keys: what a query would find in the tokens that it does not fetch
(`rest: gaussian`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pariskv_kernels.root import matrix_powers, square_roots
from pariskv_kernels.srht import padded_dim
from pariskv_kernels.srht.naive import rotation_matrix
from torch import Tensor

from pariskv.types import RECENT_QUERIES, LayerInfo, Prefill, Tensors

RIDGE = 0.03
"""What is added to a moment's diagonal, as a share of its mean: no direction is stretched without bound."""

PRIOR_TOKENS = 1000
"""How many of the prompt's tokens the model's table counts for where both are used."""


def learn_frame(
    layer: LayerInfo,
    prefill: Prefill,
    centre: str,
    precondition: str,
    exponent: float,
    weighted: bool,
    seed: int,
    with_values: bool = False,
) -> Tensors:
    """The frame of every row: what `to_frame` wants, and the same for queries; and, with_values, what `rest` wants.

    centre      [B, H, D]     float32
    keys_to     [B, H, D, P]  float32, A^T and the rotation: z = (k - centre) @ keys_to
    queries_to  [B, H, D, P]  float32, A^-1 and the rotation: z . (q @ queries_to) = P q.(k - centre)
    power       [B, H]        float32, the mean of |z|^2
    weights     [B, H, G]     float32, how much each head of a group counts in the vote; the mean is 1
    mean_value  [B, H, D]     float32
    slopes      [B, H, D, D]  float32, the covariance of keys (rows) and values (columns)
    """
    batch, heads, dim = layer.batch, layer.kv_heads, layer.head_dim
    padded, device = padded_dim(dim), layer.device
    state = {
        "centre": torch.zeros(batch, heads, dim, device=device),
        "keys_to": torch.zeros(batch, heads, dim, padded, device=device),
        "queries_to": torch.zeros(batch, heads, dim, padded, device=device),
        "power": torch.zeros(batch, heads, device=device),
        "weights": torch.ones(batch, heads, layer.group, device=device),
    }
    if with_values:
        state["mean_value"] = torch.zeros(batch, heads, dim, device=device)
        state["slopes"] = torch.zeros(batch, heads, dim, dim, device=device)
    rotation = rotation_matrix(dim, padded, seed, device).double()
    for row, tokens in enumerate(prefill.lengths):
        if tokens:
            found = _moments(prefill, row, tokens)
            mean, moment = found.about(found.mean if centre != "none" else torch.zeros_like(found.mean))
            stretch, inverse = preconditioner(moment, _query_moment(prefill, row, precondition, layer.group), exponent)
            state["centre"][row] = mean
            state["keys_to"][row] = stretch.mT @ rotation
            state["queries_to"][row] = inverse @ rotation
            state["power"][row] = padded * (stretch @ moment @ stretch.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
            if with_values:
                state["mean_value"][row], state["slopes"][row] = found.mean_value, found.slopes
            if weighted:
                state["weights"][row] = zone_shares(layer, prefill, row)
    return state


class _Moments(NamedTuple):
    """Of a row's zone, all float64.

    mean        [H, D]     of the keys
    square      [H, D, D]  of k k^T
    mean_value  [H, D]
    slopes      [H, D, D]  the covariance of keys and values
    """

    mean: Tensor
    square: Tensor
    mean_value: Tensor
    slopes: Tensor

    def about(self, centre: Tensor) -> tuple[Tensor, Tensor]:
        """The centre [H, D], their mean or 0, and the keys' second moment around it."""
        return centre, self.square - centre.unsqueeze(2) * centre.unsqueeze(1)


def _moments(prefill: Prefill, row: int, tokens: int) -> _Moments:
    keys_sum = values_sum = squares = products = torch.zeros(())
    for block, block_values in prefill.blocks(row):
        keys, values = block.double(), block_values.double()
        keys_sum = keys_sum.to(keys) + keys.sum(1)
        values_sum = values_sum.to(keys) + values.sum(1)
        squares = squares.to(keys) + keys.mT @ keys
        products = products.to(keys) + keys.mT @ values
    mean, mean_value = keys_sum / tokens, values_sum / tokens
    slopes = products / tokens - mean.unsqueeze(2) * mean_value.unsqueeze(1)
    return _Moments(mean, squares / tokens, mean_value, slopes)


def _query_moment(prefill: Prefill, row: int, precondition: str, group: int) -> Tensor | None:
    """The queries' second moment [H, D, D] float64 up to a factor, None where nothing is preconditioned."""
    if precondition == "none":
        return None
    model = None if prefill.model_moment is None else prefill.model_moment.double()
    prompt = None if prefill.query_moment is None else prefill.query_moment[row]
    if precondition == "model" and model is not None:
        return model
    if precondition == "prompt" or model is None or prompt is None:
        return prompt
    return PRIOR_TOKENS * group * model + prompt


def preconditioner(keys: Tensor, queries: Tensor | None, exponent: float) -> tuple[Tensor, Tensor]:
    """A = (C^-1 # S)^(exponent / 2) and its inverse, [H, D, D] float64, of the moments of keys and queries.

    C^-1 # S is the geometric mean of the inverse of the one and the other. With C = L L^T it is
    L^-T (L^T S L)^1/2 L^-1: source, R. Bhatia, Positive Definite Matrices, chapter 4.
    """
    if queries is None:
        identity = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device).expand_as(keys)
        return identity, identity
    keys, queries = _with_ridge(keys), _with_ridge(queries)
    lower, _ = torch.linalg.cholesky_ex(keys)
    half, _ = square_roots(lower.mT @ queries @ lower)
    half = torch.linalg.solve_triangular(lower, half, upper=False, left=False)
    mean = torch.linalg.solve_triangular(lower.mT, half, upper=True)
    return square_roots(mean) if exponent == 1 else matrix_powers(mean, exponent / 2)


def _with_ridge(moment: Tensor) -> Tensor:
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    # Keys that are all the same have no moment, and any frame is as good as another.
    ridge = (RIDGE * mean).where(mean > 0, 1.0)
    return moment + ridge[:, None, None] * torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)


def zone_shares(layer: LayerInfo, prefill: Prefill, row: int) -> Tensor:
    """How much of their attention the row's last queries paid to the zone, by head [H, G], the mean over a group 1."""
    assert prefill.recent_queries is not None
    queries = prefill.recent_queries[row].float()  # [H, G, R, D]
    newest, _ = prefill.dense(row)
    real = min(RECENT_QUERIES, prefill.lengths[row] + newest.shape[1])
    queries = queries[:, :, RECENT_QUERIES - real :]

    def log_sum(keys: Tensor, may_see: Tensor | None = None) -> Tensor:
        scores = torch.einsum("hgrd,hnd->hgrn", queries, keys.float()) * layer.scaling
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        return (scores if may_see is None else scores.masked_fill(~may_see, -torch.inf)).logsumexp(-1)

    # The newest tokens are the queries' own; a query does not see those after it.
    position = torch.arange(newest.shape[1], device=newest.device)
    own = torch.arange(newest.shape[1] - real, newest.shape[1], device=newest.device)
    steady = log_sum(newest, position <= own.unsqueeze(1))
    zone = torch.full_like(steady, -torch.inf)
    for keys, _ in prefill.blocks(row):
        zone = torch.logaddexp(zone, log_sum(keys))
    shares = torch.sigmoid(zone - steady).mean(-1) + torch.finfo(torch.float32).tiny
    return shares / shares.mean(-1, keepdim=True)
