"""`check_retriever`: drives a retriever as the core does and says what it gets wrong. For plugin authors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

import torch

from pariskv.errors import PluginContractError
from pariskv.hookspecs import Retriever
from pariskv.stages import STAGES, stages_of, traits_of
from pariskv.testing.case import Case
from pariskv.testing.distributions import DISTRIBUTIONS, Distribution, SamplePrompt, sample_prompt
from pariskv.testing.formats import check_encode, check_fit, check_stale
from pariskv.testing.selections import SELECTING, check_recall, check_selection
from pariskv.testing.stores import check_append, check_attend, check_store
from pariskv.testing.tiny import TinyRun, TinyRuns
from pariskv.types import LayerInfo

__all__ = [
    "DISTRIBUTIONS",
    "Distribution",
    "SamplePrompt",
    "TinyRun",
    "TinyRuns",
    "check_retriever",
    "sample_prompt",
]


def check_retriever(
    retriever: object,
    *,
    producer: object | None = None,
    head_dim: int = 64,
    kv_heads: int = 2,
    group: int = 3,
    lengths: Sequence[int] = (700, 16, 0),
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    top_k: int = 32,
    distribution: Distribution = "normal",
    recall_floor: float | None = None,
) -> None:
    """Drive every stage that the retriever implements and check what the contract asks of it.

    producer      makes the codes that the retriever `reads`, where these are not its own
    lengths       zone tokens of the batch's rows, rounded up to whole blocks of the format
    top_k         more than the shortest row has, so that padding is checked
    distribution  what the keys and queries are like
    recall_floor  least share of the true top_k (by the sum over the group of the probabilities) that
                  coarse_select and rerank must find together, of rows with more tokens than that: a rerank
                  among half of the tokens, a coarse_select alone with a budget of top_k; None: not checked

    Raises PluginContractError for the first thing that is wrong with the retriever.
    """
    if isinstance(retriever, type):
        raise TypeError(f"check_retriever: wanted a retriever, got the class; pass {retriever.__name__}()")
    if not any(lengths):
        raise ValueError(f"lengths: wanted at least one row with tokens, got {lengths}")
    name = type(retriever).__name__
    stages = stages_of(retriever, name)
    _refuse_unmarked(retriever, name, stages)
    traits = traits_of(retriever, stages, name)
    source = stages if producer is None else stages_of(producer, type(producer).__name__)
    if "encode" not in source and traits.reads is not None:
        raise PluginContractError(f"{name}: reads {traits.reads!r}; pass the retriever that makes it as `producer`")
    made = traits if producer is None else traits_of(producer, source, type(producer).__name__)
    lengths = [ceil(length / made.block) * made.block for length in lengths]
    layer = LayerInfo(0, len(lengths), kv_heads, group, head_dim, dtype, torch.device(device), head_dim**-0.5)
    tried = sample_prompt(layer, lengths, distribution)
    prompt = tried.keys, tried.values, tried.heads
    _check(Case(name, stages, traits, source, made, layer, lengths, top_k, *prompt), recall_floor)


def _refuse_unmarked(retriever: object, name: str, stages: Collection[str]) -> None:
    unmarked = [stage for stage in STAGES if stage not in stages and callable(getattr(retriever, stage, None))]
    if unmarked:
        raise PluginContractError(f"{name}: {unmarked[0]} would never be called; mark it with @hookimpl")
    if not stages and not isinstance(retriever, Retriever):
        raise PluginContractError(f"{name}: implements no stage; give its class pariskv.Retriever as a base")


@torch.no_grad()
def _check(case: Case, recall_floor: float | None) -> None:
    state = check_fit(case)
    if "encode" in case.stages:
        check_encode(case, state)
    if "is_stale" in case.stages:
        check_stale(case, state)
    if SELECTING & set(case.stages):
        check_selection(case, state)
        if recall_floor is not None:
            check_recall(case, state, recall_floor)
    if "allocate_store" in case.stages:
        check_store(case)
    if "attend" in case.stages:
        check_attend(case)
    if "append" in case.stages:
        check_append(case)
