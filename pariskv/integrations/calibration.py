"""A model's query statistics, computed once and kept: what `precondition: model` and `both` read.

For every layer with full attention and key/value head, the second moment E[q q^T] of its group's queries after the
rotary embedding. It is a property of the model, hardly of the text: it is measured on a few thousand tokens of prose
and source code (`calibrate.py`), and serves every prompt. The file is safetensors, in the user's cache folder, one for
each model.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from pariskv.errors import ModelError
from pariskv.integrations.models import cache_folder

FORMAT = "pariskv-calibration"
VERSION = 1
SAMPLE = 32
"""Numbers of each weight that the fingerprint looks at."""


@dataclass(frozen=True)
class Calibration:
    """moments      layer -> [H, D, D] float32, the mean of q q^T over tokens and the heads of a group
    fingerprint  of the model's weights, which the moments belong to
    about        how they were made: model, tokens, texts by sha256, versions, date
    path         the file that it was read from, None before it is saved
    """

    moments: Mapping[int, Tensor]
    fingerprint: str
    about: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


_fingerprints: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()


def fingerprint(model: PreTrainedModel) -> str:
    """What tells a model's weights from another's: a digest of names, shapes and some numbers of all of them.

    The same for the same weights in another folder; another one for another revision, whatever it is called.
    """
    if model not in _fingerprints:
        digest = hashlib.sha256()
        for name, weight in model.named_parameters():
            digest.update(f"{name} {list(weight.shape)} ".encode())
            digest.update(weight.detach().flatten()[:SAMPLE].float().cpu().numpy().tobytes())
        _fingerprints[model] = digest.hexdigest()
    return _fingerprints[model]


def file_of(model: PreTrainedModel) -> Path:
    """Where the model's calibration is kept."""
    name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
    slug = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in Path(name).name)
    return cache_folder() / "calibrations" / f"{slug}-{fingerprint(model)[:16]}.safetensors"


def find_calibration(model: PreTrainedModel) -> Calibration | None:
    """The calibration that is kept for the model, None where there is none.

    Raises ModelError for a file that is damaged, of another version, or of other weights.
    """
    path = file_of(model)
    return load_calibration(path, fingerprint(model)) if path.is_file() else None


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file under another name first, so that nobody ever reads half of it."""
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "fingerprint": calibration.fingerprint,
        "about": json.dumps(dict(calibration.about)),
    }
    moments = {f"layers.{index}.query_moment": moment.contiguous() for index, moment in calibration.moments.items()}
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(moments, partial, header)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ModelError(
            f"{path}: the calibration cannot be written: {error}; set PARISKV_CACHE to another folder"
        ) from error


def load_calibration(path: Path, wanted: str) -> Calibration:
    """What the file holds; `wanted` is the fingerprint of the model that it must belong to."""
    advice = "calibrate the model again (`pariskv calibrate CONFIG`), or delete the file"
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: the calibration cannot be read: {error}; {advice}") from error
    if header.get("format") != FORMAT or header.get("version") != str(VERSION):
        given = f"{header.get('format')} {header.get('version')}"
        raise ModelError(f"{path}: wanted {FORMAT} {VERSION}, got {given}; {advice}")
    if header.get("fingerprint") != wanted:
        raise ModelError(f"{path}: belongs to a model with other weights; {advice}")
    moments = {int(name.split(".")[1]): moment for name, moment in found.items()}
    return Calibration(moments, wanted, json.loads(header.get("about", "{}")), path)
