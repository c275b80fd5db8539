"""Choosing the next token: greedy, or by temperature and top-p with a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from pariskv.config import GenerationConfig


class Sampler:
    """Draws each row's token with the row's own generator, so that a row does not depend on its batch."""

    def __init__(self, settings: GenerationConfig, batch: int):
        self.temperature = settings.temperature
        self.top_p = settings.top_p
        self._generators = [torch.Generator().manual_seed(settings.seed) for _ in range(batch)]

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens [B] from logits [B, V]; temperature 0 is greedy."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        # Relative to the best, or a tiny temperature would make infinities.
        logits = logits.double() - logits.amax(dim=-1, keepdim=True)
        probabilities = torch.softmax(logits / self.temperature, dim=-1)
        kept = _nucleus(probabilities, self.top_p).cpu()
        drawn = [
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(kept, self._generators, strict=True)
        ]
        return torch.cat(drawn).to(logits.device)


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens with mass top_p at least; the others become 0."""
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0)
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)
