"""The pass that measures a model's query statistics: `pariskv calibrate`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from pariskv import texts
from pariskv.decode import Batch, Progress, prefill
from pariskv.integrations.calibration import Calibration, file_of, fingerprint, save_calibration
from pariskv.integrations.geometry import supported_layers
from pariskv.integrations.language_model import LanguageModel
from pariskv.integrations.paris_layer import ATTENTION
from pariskv.integrations.transformers import DenseCache, paris_attention, paris_mask, use_attention
from pariskv.registry import own_version

TOKENS = 2048
"""Tokens of each text that are read where nobody says another number."""

CHUNK = 2048

CALIBRATING = "pariskv-calibrating"
"""Our attention's name in transformers' interfaces while a model is calibrated."""


def ensure_calibrated(model: LanguageModel, progress: Progress | None = None) -> Path | None:
    """Calibrate the model on the standard texts where no calibration of it is kept; the new file, else None."""
    path = file_of(model.model)
    if path.is_file():
        return None
    samples = [text() for text in texts.CALIBRATION.values()]
    save_calibration(calibrate(model, samples, TOKENS, progress), path)
    return path


@torch.no_grad()
def calibrate(
    model: LanguageModel, samples: Sequence[str], tokens: int = TOKENS, progress: Progress | None = None
) -> Calibration:
    """Read the first `tokens` tokens of every text, and sum up what the model asks for in each layer.

    Raises ModelError where the texts hold no token.
    """
    full = [index for index, kind in enumerate(supported_layers(model.model)[0]) if kind == "full_attention"]
    rows = [model.encode([sample]).tokens[:, :tokens] for sample in samples]
    total, done = sum(row.shape[1] for row in rows), 0

    def read(start: int, tokens: int, _: int) -> None:
        if progress is not None:
            progress(start + tokens, total)

    with _watched(model, full) as moments:
        for row in rows:
            prefill(model, DenseCache(config=model.model.config), Batch(row), 1, CHUNK, partial(read, done))
            done += row.shape[1]
    about = {
        "model": model.loaded.name,
        "tokens": total,
        "texts": [texts.sha256(sample) for sample in samples],
        "pariskv": own_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    means = {index: (moment / count).float().cpu() for index, (moment, count) in moments.items()}
    return Calibration(means, fingerprint(model.model), about)


@contextmanager
def _watched(model: LanguageModel, layers: Collection[int]) -> Iterator[dict[int, tuple[Tensor, int]]]:
    """The moments of the given layers' queries, summed in float64 while the model runs: (sum, number of queries)."""
    moments: dict[int, tuple[Tensor, int]] = {}

    def attend(module: torch.nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        index: int = module.layer_idx  # type: ignore[assignment]
        if index in layers:
            heads = query.shape[1] // key.shape[1]
            flat = query[0].double().reshape(key.shape[1], heads * query.shape[2], -1)  # [H, G * n, D]
            before, count = moments.get(index, (0, 0))
            moments[index] = before + flat.mT @ flat, count + flat.shape[1]
        return paris_attention(module, query, key, *args, **kwargs)

    AttentionInterface.register(CALIBRATING, attend)
    AttentionMaskInterface.register(CALIBRATING, paris_mask)
    use_attention(model.model, CALIBRATING)
    try:
        yield moments
    finally:
        use_attention(model.model, ATTENTION)
        AttentionInterface.register(CALIBRATING, paris_attention)  # lets go of the sums
