"""Choosing the next token: greedy, or by temperature, top-k and top-p with a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pariskv.config import GenerationConfig

NOT_FINITE = -1
"""In place of a token: the row's logits hold NaN or infinity, so there is nothing to choose from."""


class Sampler:
    """Draws each row's token with the row's own generator, so that a row does not depend on its batch.

    A step's random numbers are drawn on the host before it (`draws`); what the device makes of them and the logits
    (`choose`) asks the host nothing, so that a CUDA graph can hold it.
    """

    def __init__(self, settings: GenerationConfig, batch: int, seeds: Sequence[int] | None = None):
        self.temperature = settings.temperature
        self.top_k, self.top_p = settings.top_k, settings.top_p
        self._seed = settings.seed
        each = [settings.seed] * batch if seeds is None else seeds
        self._generators = [torch.Generator().manual_seed(seed) for seed in each]

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens [B] from logits [B, V], NOT_FINITE where they are not; temperature 0 is greedy."""
        return self.choose(logits, self.draws().to(logits.device))

    def restart(self, row: int, logits: Tensor, seed: int | None = None) -> Tensor:
        """A row's first token [1] of a new request, from its logits [1, V]; seed None: the configuration's."""
        self._generators[row].manual_seed(self._seed if seed is None else seed)
        draw = torch.zeros(1, dtype=torch.float64) if self.temperature == 0 else self._draw(row)
        return self.choose(logits, draw.to(logits.device))

    def draws(self) -> Tensor:
        """The next random number of each row, float64 [B] in [0, 1); zeros where the choice is greedy."""
        if self.temperature == 0:
            return torch.zeros(len(self._generators), dtype=torch.float64)
        return torch.cat([self._draw(row) for row in range(len(self._generators))])

    def _draw(self, row: int) -> Tensor:
        return torch.rand(1, dtype=torch.float64, generator=self._generators[row])

    def choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Tokens [B] from logits [B, V]: where the row's draw falls among the kept tokens' probabilities."""
        largest, best = logits.max(dim=-1)  # NaN, if any of them is
        chosen = best if self.temperature == 0 else self._drawn(logits, draws)
        return chosen.where(largest.isfinite(), NOT_FINITE)

    def _drawn(self, logits: Tensor, draws: Tensor) -> Tensor:
        # Relative to the best, or a tiny temperature would make infinities.
        logits = logits.double() - logits.amax(dim=-1, keepdim=True)
        likely = _most_likely(logits, self.top_k)
        kept = _nucleus(torch.softmax(likely / self.temperature, dim=-1), self.top_p)
        reached = kept.cumsum(dim=-1)
        whole = reached[:, -1:]
        # The first token that reaches beyond the draw; never behind the last one that is kept.
        return ((reached <= draws.unsqueeze(-1) * whole) & (reached < whole)).sum(dim=-1)


def _most_likely(logits: Tensor, top_k: int) -> Tensor:
    """The top_k largest logits, and those equal to the last of them; the others become -inf. 0: all of them."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens with mass top_p at least; the others become 0."""
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0)
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)
