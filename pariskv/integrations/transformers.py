"""pariskv behind Hugging Face transformers, through its official extension points only.

ParisCache       a `Cache`: our layers where the model has full attention, the stock ones elsewhere
paris_attention  registered with `AttentionInterface`; finds its layer by a tag on the keys
paris_mask       registered with `AttentionMaskInterface`, without which padding would be lost

model.generate(**inputs, cache=ParisCache(model, config))
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache
from transformers.masking_utils import causal_mask_function, sdpa_mask

from pariskv.attention import dense_attention
from pariskv.binding import LayerPipeline, bind
from pariskv.cache import RequestState, window_of
from pariskv.config import Config, load_config
from pariskv.errors import ModelError
from pariskv.integrations.calibration import Calibration, find_calibration
from pariskv.integrations.compiled import is_running, layer_step
from pariskv.integrations.geometry import Geometry, refuse_missing_rotary, supported_layers
from pariskv.integrations.paris_layer import ATTENTION, TAG, ParisLayer
from pariskv.integrations.rotary import rotary_of
from pariskv.integrations.stock_rows import refuse_unknown, take_stock_row, widen
from pariskv.planner import Forward, Need, Planner
from pariskv.registry import Registry
from pariskv.request import HEADROOM
from pariskv.resolve import for_device
from pariskv.warmup import warm_up


class ParisCache(Cache):
    """The cache of one request: give it to `model.generate(cache=...)`, or to `pariskv.decode`.

    Sets the model's attention implementation to pariskv's, which is dense attention for any other cache.

    model   a transformers decoder whose attention goes through `AttentionInterface`
    config  what `load_config` returns; the defaults without one
    known   what the memory planner has measured, shared by the caches of one model
    Raises ModelError for a model that cannot be served, ConfigError and PluginError for a bad config.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Config | None = None,
        registry: Registry | None = None,
        known: dict[object, Any] | None = None,
    ):
        config = for_device(config or load_config(None), model.device)
        text_config = model.config.get_text_config(decoder=True)
        layer_types, layer_kwargs = supported_layers(model)
        retrieving = [index for index, kind in enumerate(layer_types) if kind == "full_attention"]
        self.config, self.registry = config, registry or Registry.load()
        pipelines = bind(config, len(layer_types), self.registry, retrieving)
        rotary = rotary_of(model)
        refuse_missing_rotary(pipelines.values(), rotary is not None, model)
        self.geometry = geometry = Geometry(model, text_config)
        windows = {index: window_of(pipeline, config.window, index) for index, pipeline in pipelines.items()}
        self.planner = Planner(
            config,
            geometry.expected_info,
            {index: pipeline.plain for index, pipeline in pipelines.items()},
            windows,
            model.device,
            lambda: _activations(model),
            {} if known is None else known,
        )
        calibration = _calibration(model, pipelines)
        self.calibration = None if calibration is None else str(calibration.path)
        moments = {index: one.to(model.device) for index, one in calibration.moments.items()} if calibration else {}
        self.request = RequestState(pipelines, config.window, rotary, self.planner.history, moments)
        super().__init__(
            layers=[
                ParisLayer(index, self.request, geometry, config.prefill.turns)
                if kind == "full_attention"
                else DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs)
                for index, (kind, kwargs) in enumerate(zip(layer_types, layer_kwargs, strict=True))
            ]
        )
        use_attention(model)

    # What `pariskv.decode` asks of a cache

    def begin_prefill(self, prompt_tokens: int, new_tokens: int = HEADROOM) -> None:
        if self.get_seq_length():
            raise ModelError(
                "this cache holds a request already; make a new ParisCache, or continue it by model.generate(cache=...)"
            )
        self.request.begin_prefill(prompt_tokens, new_tokens)

    def end_prefill(self) -> None:
        for layer in self.layers:
            if isinstance(layer, ParisLayer):
                layer.refuse_unattended()
        self.request.end_prefill()

    def set_active(self, active_rows: list[bool]) -> None:
        self.request.set_active(active_rows)

    def end_step(self) -> None:
        self.request.end_step()

    # Rows come and go, between two steps

    @property
    def ours(self) -> Iterator[ParisLayer]:
        return (layer for layer in self.layers if isinstance(layer, ParisLayer))

    @property
    def _stock(self) -> Iterator[Any]:
        """Layers that transformers keeps: those with a sliding window."""
        return (layer for layer in self.layers if not isinstance(layer, ParisLayer))

    @property
    def needs_mask(self) -> bool:
        """Whether a step must say what is padding: our layers know, transformers' own do not."""
        return any(True for _ in self._stock)

    def open_rows(self, rows: int, prompt_tokens: int, new_tokens: int = HEADROOM) -> None:
        """Begin a batch whose rows hold nothing and are not active; `take_row` gives them requests.

        prompt_tokens, new_tokens  of the longest request that is known, to make room for
        Raises ModelError for a model with layers whose rows cannot be exchanged.
        """
        refuse_unknown(self._stock)
        self.begin_prefill(prompt_tokens, new_tokens)
        self.request.request.prefilling = False
        self.request.open_rows(self.geometry.expected_info(layer.index, rows) for layer in self.ours)
        for layer in self.ours:
            layer.state, layer.is_initialized = self.request.layers[layer.index], True

    def take_row(self, row: int, source: ParisCache, source_row: int = 0) -> None:
        """Make a row hold what another cache of this model and configuration holds in one of its own."""
        source.request.settle()
        columns = max(self.get_seq_length(), source.request.lengths[source_row])
        self.request.take_row(row, source.request, source_row)
        for mine, other in zip(self._stock, source._stock, strict=True):
            take_stock_row(mine, row, other, source_row, self.request.batch, columns)
        self._set_columns(columns)

    def clear(self) -> None:
        """Forget the request, as `reset` does, and keep the room that it took for the next one of as many rows.

        Raises PluginContractError where a store cannot forget; then the cache is of no more use.
        """
        self.request.clear()
        for layer in self.ours:
            layer.cleared()
        for layer in self._stock:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens of every row: -n of them, as transformers counts.

        Raises PluginContractError, BindingError or ModelError where a store or a sliding window cannot give back what
        it held; then the cache is of no more use.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop: wanted the tokens to remove as a negative number, got {tokens_to_remove}")
        self.request.settle()
        columns = self.get_seq_length() + tokens_to_remove
        for row, tokens in enumerate(self.request.lengths):
            self.request.crop(row, max(0, tokens + tokens_to_remove))
        for layer in self._stock:
            try:
                layer.crop(tokens_to_remove)
            except RuntimeError as error:
                raise ModelError(
                    f"crop: a sliding-window layer has dropped what it would go back to; activate_past_recording() "
                    f"before the tokens come that may be taken back, or read the prompt anew ({error})"
                ) from error
        self._set_columns(max(0, columns))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row b hold what row beam_idx[b] did; only what the two do not have in common is copied."""
        self.request.settle()
        self.request.reorder(beam_idx.tolist())
        for layer in self._stock:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Let the batch be the rows at the indices, in their order; a row may come more than once."""
        self._take_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let every row be there `repeats` times, one after the other."""
        self._take_rows([row for row in range(self.request.batch) for _ in range(repeats)])

    def _take_rows(self, sources: list[int]) -> None:
        if not self.get_seq_length():
            return  # as transformers' own: the first prompt says how many rows there are
        self.request.settle()
        self.request = self.request.with_rows(sources)
        for layer in self.ours:
            layer.request, layer.state = self.request, self.request.layers[layer.index]
        for layer in self._stock:
            layer.batch_select_indices(torch.tensor(sources, device=layer.keys.device))

    def fork(self, new_tokens: int = HEADROOM) -> ParisCache:
        """Another cache that holds the same, and shares what is in the store with this one; either goes on by itself.

        Sinks, rings and sliding windows are copied, codes once either of the two adds to them.

        new_tokens  that will be generated with it, to make room for
        Raises BindingError where a layer's store cannot be shared, ModelError where nothing is held.
        """
        if not self.get_seq_length():
            raise ModelError("fork: the cache holds nothing yet; read a prompt first")
        for layer in self.ours:
            layer.refuse_unattended()
        self.request.settle()
        other = copy.copy(self)
        other.request = self.request.fork(new_tokens)
        other.layers = [
            layer.fork(other.request) if isinstance(layer, ParisLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return other

    def _set_columns(self, columns: int) -> None:
        for layer in self.ours:
            layer.cropped(columns)
        for layer in self._stock:
            widen(layer, columns)

    # What `pariskv.graph` asks of a cache

    def graph_reason(self) -> str:
        stock = [index for index, layer in enumerate(self.layers) if not isinstance(layer, ParisLayer)]
        if stock:
            return f"layer {stock[0]} has a sliding window, whose cache grows by concatenation"
        return self.request.graph_reason()

    def shape(self) -> object:
        return self.request.shape()

    def count_step(self) -> None:
        self.request.count_step()
        for layer in self.layers:
            assert isinstance(layer, ParisLayer)
            layer.columns += 1

    def warm_up(self) -> None:
        """Let every stage compile what it compiles at its first call."""
        first = min(self.request.pipelines)
        warm_up(self.geometry.expected_info(first, 1), self.request.pipelines.values())

    def estimate(self, batch: int, prompt_tokens: int, new_tokens: int) -> Need:
        """What a request of `batch` rows would take, before anything is allocated."""
        return self.planner.estimate(batch, prompt_tokens, new_tokens)

    @property
    def stock_bytes(self) -> int:
        """Keys and values of the layers that are not ours (sliding windows)."""
        return _held_bytes(self)


class DenseCache(DynamicCache):
    """transformers' own dense cache, for `pariskv.decode`: the baseline to compare with."""

    def begin_prefill(self, prompt_tokens: int, new_tokens: int) -> None:
        """Nothing to prepare: a dense cache grows by concatenation."""

    def end_prefill(self) -> None:
        """Nothing to do."""

    def set_active(self, active_rows: list[bool]) -> None:
        """A dense cache goes on writing for rows that have ended; their tokens are not looked at."""

    def end_step(self) -> None:
        """Nothing to do."""

    @property
    def nbytes(self) -> int:
        """Keys and values that it holds."""
        return _held_bytes(self)


def _calibration(model: PreTrainedModel, pipelines: Mapping[int, LayerPipeline]) -> Calibration | None:
    """The model's calibration, where a format wants its query moments and one is kept."""
    if not any("model_moment" in encoder.needs for pipeline in pipelines.values() for encoder in pipeline.encoders):
        return None
    return find_calibration(model)


def _activations(model: PreTrainedModel) -> Forward | None:
    from pariskv.integrations.activations import activations_of

    return activations_of(model)


def _held_bytes(cache: Cache) -> int:
    """Keys and values of a cache's stock layers."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def paris_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface; returns [B, Q, H * G, D].

    Keys without our tag (another cache, a sliding-window layer) get dense attention.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if torch.compiler.is_compiling() and is_running():
        index = cast(int, module.layer_idx)
        return layer_step(query, key, value, sinks, index, scaling).transpose(1, 2), None
    layer: ParisLayer | None = getattr(key, TAG, None)
    if layer is None:
        out = dense_attention(query, key, value, attention_mask, scaling, softcap, sinks)
    else:
        _refuse_other_scores(layer, scaling, softcap)
        out = layer.attend(query, key, value, attention_mask, scaling, sinks)
    return out.transpose(1, 2), None


def _refuse_other_scores(layer: ParisLayer, scaling: float, softcap: float | None) -> None:
    assert layer.state is not None
    info = layer.state.info
    if scaling != info.scaling or softcap != info.softcap:
        raise ModelError(
            f"layer {layer.index}: the model attends with scaling {scaling} and soft-cap {softcap}, but its module "
            f"declares {info.scaling} and {info.softcap}; this model's attention is not supported"
        )


def paris_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of transformers' interface, bool [B, 1, Q, n] or None.

    Where the keys end with the chunk and attention is full, a causal chunk needs none (dense attention is causal
    without a mask), and one token needs the padding alone: a view, so that a step asks the host nothing. A static
    cache's keys go on behind the chunk, with rows that nobody wrote.
    """
    ends_here = isinstance(q_offset, int) and kv_length == q_offset + q_length
    is_full = local_size is None and mask_function is causal_mask_function and ends_here
    if is_full and attention_mask is None:
        return None
    if is_full and q_length == 1:
        assert attention_mask is not None
        return attention_mask[:, None, None, kv_offset : kv_offset + kv_length].bool()
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        # transformers' skip is for its own attention function, which takes a missing mask in another way.
        **{**kwargs, "allow_is_causal_skip": False},
    )
    return mask


def register() -> None:
    """Make 'pariskv' known to transformers' attention and mask interfaces; safe to repeat."""
    AttentionInterface.register(ATTENTION, paris_attention)
    AttentionMaskInterface.register(ATTENTION, paris_mask)


def use_attention(model: PreTrainedModel, name: str = ATTENTION) -> None:
    """Set the model's attention implementation, and see that it took."""
    register()
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ModelError(
            f"{type(model).__name__} did not take the attention implementation '{name}': its attention does not go "
            f"through transformers' AttentionInterface; such a model is not supported"
        )
