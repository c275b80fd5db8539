"""What both placements of MagicPIG share: the step's queries, and codes that count what is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pariskv_kernels.lsh import Queries, Rule
from torch import Tensor

from pariskv.errors import PluginContractError
from pariskv.types import Codes, Query

if TYPE_CHECKING:
    from pariskv_plugins.magicpig import Options


class SampledCodes(Codes):
    """Codes that also count what the steps sample, int64 on the codes' device: tokens of all rows and key/value heads.

    sampled  that some query head of the group sampled
    dropped  those of them for which there was no slot
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sampled = torch.zeros((), dtype=torch.int64, device=self.length.device)
        self.dropped = torch.zeros_like(self.sampled)


def count_sample(codes: Codes, sampled: Tensor, kept: Tensor) -> None:
    """Add a step's numbers of sampled and of kept tokens to the codes', if they count."""
    if isinstance(codes, SampledCodes):
        codes.sampled += sampled.sum()
        codes.dropped += (sampled - kept).sum()


def queries_of(query: Query) -> Queries:
    """The step's queries as `encode_query` left them."""
    if query.encoded is None or not {"hashes", "shifts"} <= set(query.encoded):
        raise PluginContractError(
            "magicpig: query.encoded has no 'hashes' and 'shifts'; pass what encode_query of the codes' producer "
            "returned"
        )
    return Queries(query.heads.float(), query.encoded["hashes"], query.encoded["shifts"])


def rule_of(query: Query, options: Options) -> Rule:
    return Rule(options.bits, options.tables, query.scaling, query.softcap)
