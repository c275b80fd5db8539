"""The configuration: one frozen dataclass per YAML section; load, override, validate, print.

`load_config` reads a file, `parse_config` a text or a mapping; both answer with a `Config` in which
every value has its type and its range, or with a ConfigError of one line. Names of retrievers
and the number of layers are not known here: `pariskv.binding` checks them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pariskv.budget import CandidateRule
from pariskv.errors import ConfigError
from pariskv.structured import (
    apply_overrides,
    build,
    did_you_mean,
    dump_yaml,
    load_yaml,
    resolve_interpolations,
    type_name,
)

MOST_LAYERS = 10_000

Turns = Literal["dense", "retrieved"]

DEFAULT = "default"
"""The key under `layers:` that the other keys inherit from."""


@dataclass(frozen=True)
class ModelConfig:
    name: str = field(default="smollm2-135m", metadata={"help": "smollm2-135m, a hub id, a folder or a .gguf file"})
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = field(
        default="auto",
        metadata={"help": "type of weights and activations; auto: float32 on a CPU, the checkpoint's on a GPU"},
    )
    device: str = field(default="auto", metadata={"help": "auto (the GPU where there is one), cpu, cuda or cuda:N"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run the Python code in a model's folder"})
    allow_beyond_context: bool = field(
        default=False, metadata={"help": "go past the context length that the model was trained for"}
    )


@dataclass(frozen=True)
class LayerConfig:
    """One entry of `layers:`; None inherits from `default`."""

    retriever: str | None = field(default=None, metadata={"help": "instance that gives every stage it implements"})
    encode: str | list[str] | None = field(
        default=None, metadata={"help": "further instances whose codes are kept, a name or a list"}
    )
    coarse_select: str | None = field(default=None, metadata={"help": "instance that proposes candidates"})
    rerank: str | None = field(
        default=None, metadata={"help": "instance that keeps the best top_k; none: the candidates are top_k already"}
    )
    fetch: str | None = field(default=None, metadata={"help": "instance that brings the selected rows"})
    update: str | None = field(default=None, metadata={"help": "instance that appends rows to the store"})
    candidates: Literal["auto"] | int | float | None = field(
        default=None,
        metadata={"help": "auto (the retriever's table, or the paper's), a ratio in (0, 1] or a count of tokens"},
    )
    top_k: int | None = field(
        default=None, metadata={"help": "tokens that are fetched per key/value head; 0: sink and ring only"}
    )
    codes_from: str | None = field(
        default=None, metadata={"help": "instance whose codes are read where several make the same format"}
    )


DEFAULT_LAYER = LayerConfig(retriever="pariskv", candidates="auto", top_k=512)
"""What `layers.default` holds where the YAML says nothing."""


@dataclass(frozen=True)
class WindowConfig:
    sink: int = field(default=64, metadata={"help": "first tokens, always attended"})
    local: int = field(default=256, metadata={"help": "most recent tokens, always attended; more in deeper layers"})
    update_interval: int = field(default=256, metadata={"help": "tokens that leave for the retrieval zone at a time"})
    dense_below: int = field(default=2000, metadata={"help": "rows with fewer tokens attend to all of them"})


@dataclass(frozen=True)
class PrefillConfig:
    chunk: Literal["auto"] | int = field(
        default="auto",
        metadata={"help": "tokens a chunk; auto: up to 16384 at once, else 8192"},
    )
    history: Literal["auto", "buffer", "store"] = field(
        default="auto",
        metadata={
            "help": "where a chunk finds the ones before it: buffer (on the device), store; auto: buffer where it fits"
        },
    )
    turns: Turns = field(
        default="dense",
        metadata={"help": "a later turn's tokens attend to the whole history (dense) or to what is retrieved of it"},
    )


@dataclass(frozen=True)
class GenerationConfig:
    max_new_tokens: int = field(default=128, metadata={"help": "tokens to generate at most"})
    temperature: float = field(default=0.0, metadata={"help": "0: the most probable token"})
    top_k: int = field(default=0, metadata={"help": "sample from so many of the most probable tokens; 0: from all"})
    top_p: float = field(default=1.0, metadata={"help": "sample from the smallest set with this probability"})
    seed: int = field(default=0, metadata={"help": "seed of the sampling"})
    chat: Literal["auto", "on", "off"] = field(
        default="auto", metadata={"help": "put prompts through the chat template; auto: where the tokenizer has one"}
    )


@dataclass(frozen=True)
class RuntimeConfig:
    graph: Literal["auto", "on", "off"] = field(
        default="auto", metadata={"help": "replay steps from a CUDA graph; auto: where that is possible"}
    )
    compile: bool = field(default=False, metadata={"help": "torch.compile the forward of the captured step"})
    attend: str = field(default="auto", metadata={"help": "instance that attends; auto: numba on a GPU, else torch"})
    check_memory: bool = field(default=True, metadata={"help": "refuse a run that does not fit before it allocates"})


@dataclass(frozen=True)
class DebugConfig:
    trace_hooks: bool = field(
        default=False,
        metadata={"help": "print every hook call with shapes and time, to standard error; steps run eagerly"},
    )


@dataclass(frozen=True)
class QuickstartConfig:
    prompt_tokens: int = field(default=4000, metadata={"help": "tokens of the needle test's prompt at most"})
    depth: float = field(default=0.5, metadata={"help": "where the needle lies, 0 (beginning) to 1 (end)"})
    seed: int = field(default=0, metadata={"help": "seed of the number to find"})


@dataclass(frozen=True)
class EvaluationConfig:
    tasks: list[str] = field(default_factory=list, metadata={"help": "what `pariskv eval tasks` runs, such as ruler"})
    retrievers: list[str] = field(
        default_factory=list,
        metadata={"help": "retrievers that answer; empty: dense and that of layers.default; config: the file as it is"},
    )
    lengths: list[int] = field(
        default_factory=lambda: [4096], metadata={"help": "tokens of RULER's prompts with their answers"}
    )
    limit: int | None = field(default=None, metadata={"help": "items of each task at most"})
    samples: int | None = field(default=None, metadata={"help": "answers to each item; null: as the task has it"})
    max_new_tokens: int | None = field(
        default=None, metadata={"help": "tokens of an answer at most; null: as the task has it"}
    )
    batch: int = field(default=1, metadata={"help": "answers that are decoded together"})


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig, metadata={"help": "the model"})
    retrievers: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata={"help": "instance name: its options; `type` defaults to the name"}
    )
    layers: dict[str, LayerConfig] = field(
        default_factory=lambda: {DEFAULT: DEFAULT_LAYER},
        metadata={"help": "default, a layer N or a range A-B (both included): its stages"},
    )
    store: str = field(
        default="auto",
        metadata={"help": "instance that keeps the rows of the zone; auto: uva on a GPU, else resident"},
    )
    window: WindowConfig = field(default_factory=WindowConfig, metadata={"help": "what is attended densely"})
    prefill: PrefillConfig = field(default_factory=PrefillConfig, metadata={"help": "how the prompt is read"})
    generation: GenerationConfig = field(default_factory=GenerationConfig, metadata={"help": "how tokens are sampled"})
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig, metadata={"help": "how a step is run"})
    wrappers: list[str] = field(default_factory=list, metadata={"help": "hook wrappers by name, outermost first"})
    debug: DebugConfig = field(default_factory=DebugConfig, metadata={"help": "what a plugin's author looks at"})
    quickstart: QuickstartConfig = field(default_factory=QuickstartConfig, metadata={"help": "the quickstart's prompt"})
    evaluation: EvaluationConfig = field(
        default_factory=EvaluationConfig, metadata={"help": "what `pariskv eval tasks` measures"}
    )


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, or the defaults where path is None, with `key=value` overrides on top."""
    if path is None:
        return parse_config({}, overrides)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such configuration file (looked in {Path.cwd()}); give the path of one, or write one: "
            f"an empty file means the defaults, {ModelConfig().name} with pariskv in every layer"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a text file: {error}") from error
    return _config(load_yaml(text, str(path)), overrides)


def parse_config(text_or_mapping: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML text or in a mapping, for the Python API."""
    if isinstance(text_or_mapping, str):
        return _config(load_yaml(text_or_mapping, "configuration"), overrides)
    return _config(text_or_mapping, overrides)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain values, as `parse_config` takes them; what a layer inherits is left out."""
    values = asdict(config)
    for name, layer in values["layers"].items():
        values["layers"][name] = {key: value for key, value in layer.items() if value is not None}
    return values


def to_yaml(config: Config) -> str:
    """The resolved configuration as a YAML text that `parse_config` reads back."""
    return dump_yaml(to_dict(config))


def layer_range(key: str) -> range:
    """The layers that a key of `layers:` names: `5` or `2-9`, both ends included."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", key)
    if match is None:
        raise ConfigError(f"layers.{key}: wanted `default`, a layer `N` or a range `A-B`{did_you_mean(key, [DEFAULT])}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"layers.{key}: the range is reversed, write {last}-{first}")
    if last >= MOST_LAYERS:
        raise ConfigError(f"layers.{key}: wanted layers below {MOST_LAYERS}, no model has that many")
    return range(first, last + 1)


def _config(values: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    config = build(Config, resolve_interpolations(apply_overrides(values, overrides)))
    for name, options in config.retrievers.items():
        if not isinstance(options.get("type", name), str):
            raise ConfigError(f"retrievers.{name}.type: got {options['type']!r}, wanted a retriever's name")
    _check_layers(config.layers)
    _check_sizes(config)
    default = {
        key: value for key, value in asdict(config.layers.get(DEFAULT, LayerConfig())).items() if value is not None
    }
    others = {key: layer for key, layer in config.layers.items() if key != DEFAULT}
    return replace(config, layers={DEFAULT: replace(DEFAULT_LAYER, **default), **others})


def _check_layers(layers: Mapping[str, LayerConfig]) -> None:
    owner: dict[int, str] = {}
    for key, layer in layers.items():
        for index in layer_range(key) if key != DEFAULT else ():
            if index in owner:
                raise ConfigError(f"layers.{owner[index]} and layers.{key} overlap at layer {index}")
            owner[index] = key
        if layer.candidates is not None:
            try:
                CandidateRule.parse(layer.candidates)
            except ConfigError as error:
                raise ConfigError(f"layers.{key}.{error}") from None
        if layer.top_k is not None:
            _at_least(f"layers.{key}.top_k", layer.top_k, 0)


def _check_sizes(config: Config) -> None:
    window, generation = config.window, config.generation
    _at_least("window.sink", window.sink, 0)
    _at_least("window.local", window.local, 1)
    _at_least("window.update_interval", window.update_interval, 1)
    _at_least("window.dense_below", window.dense_below, 0)
    if config.prefill.chunk != "auto":
        _at_least("prefill.chunk", config.prefill.chunk, 1)
    _at_least("generation.max_new_tokens", generation.max_new_tokens, 1)
    _at_least("generation.seed", generation.seed, 0)
    _at_least("generation.top_k", generation.top_k, 0)
    _at_least("quickstart.prompt_tokens", config.quickstart.prompt_tokens, 1)
    _at_least("quickstart.seed", config.quickstart.seed, 0)
    _check_evaluation(config.evaluation)
    if not 0 <= config.quickstart.depth <= 1:
        raise ConfigError(f"quickstart.depth: got {config.quickstart.depth}, wanted 0 <= depth <= 1")
    if not (isfinite(generation.temperature) and generation.temperature >= 0):
        raise ConfigError(f"generation.temperature: got {generation.temperature}, wanted a number >= 0")
    if not 0 < generation.top_p <= 1:
        raise ConfigError(f"generation.top_p: got {generation.top_p}, wanted 0 < top_p <= 1")


def _check_evaluation(evaluation: EvaluationConfig) -> None:
    _at_least("evaluation.batch", evaluation.batch, 1)
    for name in ("limit", "samples", "max_new_tokens"):
        value = getattr(evaluation, name)
        if value is not None:
            _at_least(f"evaluation.{name}", value, 1)
    for length in evaluation.lengths:
        _at_least("evaluation.lengths", length, 1)


def _at_least(path: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{path}: got {value}, wanted an integer >= {least}")


@dataclass(frozen=True)
class Row:
    """One key of the schema, for the documentation."""

    path: str
    type: str
    default: str
    help: str


def describe_schema() -> list[Row]:
    """Every key with its type, its default and a line of explanation, in the order of the file."""
    return [row for item in fields(Config) for row in _rows(Config, item, "")]


def _rows(schema: type, item: Field[Any], prefix: str) -> list[Row]:
    hint = get_type_hints(schema)[item.name]
    path = f"{prefix}{item.name}"
    if isinstance(hint, type) and is_dataclass(hint):
        return [row for inner in fields(hint) for row in _rows(hint, inner, f"{path}.")]
    if hint == dict[str, LayerConfig]:
        own = Row(path, "section", "default", item.metadata["help"])
        return [own, *(row for inner in fields(LayerConfig) for row in _rows(LayerConfig, inner, f"{path}.KEY."))]
    return [Row(path, type_name(hint), _default(schema, item), item.metadata["help"])]


def _default(schema: type, item: Field[Any]) -> str:
    if schema is LayerConfig:
        value = getattr(DEFAULT_LAYER, item.name)
    else:
        value = item.default_factory() if item.default_factory is not MISSING else item.default
    return dump_yaml({"value": value}).removeprefix("value:").strip()
