"""The state of one attention layer of a request: its rows on the device, its store, its codes.

What changes per token lives here. A layer is either reading a prompt (`prompt` is set) or decoding
(`device` is set); `append` is the way in for both, `settle` moves what is due into the zone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from pariskv.binding import Encoder, LayerPipeline
from pariskv.errors import CapacityError, ModelError, ShapeError
from pariskv.history import StreamedPrompt
from pariskv.hookspecs import Need
from pariskv.prompt import BufferedPrompt, History, Pair, Prompt, PromptView, QueryStatistics
from pariskv.request import HEADROOM, Request
from pariskv.types import Budget, Codes, LayerInfo, Store, Tensors
from pariskv.window import Window
from pariskv.working import DeviceRows


class LayerState:
    """Everything that one layer of one request holds.

    lengths, zones  host integers, a row each: its tokens, and how many of them are in the zone
    """

    def __init__(self, info: LayerInfo, pipeline: LayerPipeline, window: Window, request: Request):
        self.info = info
        self.pipeline = pipeline
        self.window = window.without_zone() if pipeline.indexes == "none" else window
        self.request = request
        self.lengths = [0] * info.batch
        self.zones = [0] * info.batch
        self.active_rows = [True] * info.batch
        self.columns = 0  # of the model: real tokens and padding
        self._in_step = self._is_counted = False
        self.zone_length = torch.zeros(info.batch, dtype=torch.int32, device=info.device)
        self.budget = Budget(0, torch.zeros_like(self.zone_length))
        self.refits = 0  # rows that a format was fitted to again
        self.steps = 0
        self.steady = 0  # sink and ring tokens attended to, summed over steps and rows
        # How often each slot held a selected row; see `count_selected`. Nobody sums it before `attended` is asked for.
        slots = pipeline.slots(info.group)
        self.selected = torch.zeros(info.batch, info.kv_heads, slots, dtype=torch.int32, device=info.device)
        self.chosen: Tensor | None = None  # which slots hold a row in the last step; a graph writes it anew
        self.prompt: Prompt | None = None
        self.prefill_history: History = "buffer"  # how the last prompt was read
        self.device: DeviceRows | None = None
        self.store: Store | None = None
        self.codes: dict[str, Codes] = {}
        self.states: dict[str, dict[str, Tensor]] = {}
        # Of each format, the rows that it has been fitted to, and how many tokens their zones had then.
        self._fitted: dict[str, dict[int, int]] = {encoder.name: {} for encoder in pipeline.encoders}
        self._queries: QueryStatistics | None = None
        self._no_codes = Codes({}, {}, self.zone_length, 0)

    # The way in

    @property
    def decoding(self) -> bool:
        return self.device is not None

    @property
    def retrieves(self) -> bool:
        """Some row has a zone and the pipeline takes from it; changes only between steps."""
        return self.pipeline.coarse_select is not None and any(self.zones)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the model's new keys and values [B, H, Q, D].

        returns what a prompt's buffer holds [B, H, n, D]; without one, and in a decode step, what came
        """
        if keys.shape[2] == 1 and any(self.lengths) and not self.request.prefilling:
            if self.device is None:
                self.end_prefill()
            self.count_step()
            assert self.device is not None
            if self.pipeline.append is None:
                self.device.append(keys, values, self.request.next_slots(self.columns, self.device))
            else:
                self.pipeline.append(keys, values, self.device.working)
            return keys, values
        self.columns += keys.shape[2]
        if self.prompt is None:
            self._begin_prompt(keys.shape[2])
        assert self.prompt is not None
        return self.prompt.append(keys, values)

    def count_step(self) -> None:
        """The host's part of a step; the device's is `append`, or a graph that holds it."""
        self.finish_step()
        self.columns += 1
        self._in_step, self._is_counted = True, False

    def finish_step(self) -> None:
        """Count the step that was appended, and move what is due: by the loop between two steps, else by the next."""
        if not self._in_step:
            return
        count_selected([self])
        self._in_step = False
        self.lengths = [n + is_active for n, is_active in zip(self.lengths, self.active_rows, strict=True)]
        self.steps += 1
        self.steady += sum(self.lengths) - sum(self.zones)
        self.settle()

    def set_active(self, active_rows: list[bool]) -> None:
        """Say which rows still generate; the others keep their length. Between steps only."""
        if active_rows != self.active_rows:
            assert self.device is not None
            self.active_rows = list(active_rows)
            self.device.active.copy_(torch.tensor(active_rows))

    # Reading a prompt

    def _begin_prompt(self, chunk: int) -> None:
        """Start reading, with the history in front where this is a later turn."""
        self.finish_step()
        history = self.columns - chunk
        expected = max(self.columns, self.request.prompt_tokens)
        if self.pipeline.indexes != "none" and self.request.history(self.info.batch, expected) == "store":
            streamed = StreamedPrompt(self.info, self.window.sink)
            if history:
                held = [_as_pair(self._steady(row)) for row in range(self.info.batch)]
                streamed.resume(history, held, self.zones, self.store)
            self.prompt = streamed
        else:
            buffered = BufferedPrompt(self.info, expected)
            if history:
                buffered.resume(history, self.lengths, self._history)
            self.prompt = buffered
        self.prefill_history = self.prompt.history
        self.device = None

    def _history(self, row: int) -> Iterator[Pair]:
        """Keys and values [H, n, D] of everything that a row holds, in token order."""
        sink, ring = self._steady(row)
        yield sink
        if self.zones[row] and self.store is not None:
            yield self.store.read(row, 0, self.zones[row])
        yield ring

    def _steady(self, row: int) -> tuple[Pair, Pair]:
        """Keys and values [H, n, D] of a row's sink, and of its ring."""
        assert self.device is not None
        tokens, zone = self.lengths[row], self.zones[row]
        first = min(self.window.sink, tokens)
        return _split(self.device.read(row, 0, first)), _split(self.device.read(row, first + zone, tokens))

    def attend_chunk(self, query: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """A prompt's newest chunk attends to everything so far; then the blocks that are complete move.

        query [B, H * G, Q, D]; mask [B, 1, Q, n] or None; sinks as in `dense_attention`; returns as the query
        """
        assert self.prompt is not None
        self.prompt.note_mask(mask)
        out = self.prompt.attend(query, mask, sinks)
        self._take_in(query)
        return out

    def chunk_attended(self, query: Tensor, mask: Tensor | None) -> None:
        """The same for a chunk that somebody else attended to, or nobody."""
        assert self.prompt is not None
        self.prompt.note_mask(mask)
        self._take_in(query)

    def _take_in(self, query: Tensor) -> None:
        assert self.prompt is not None
        self.lengths = self.prompt.lengths
        if self.pipeline.wants_queries:
            self._queries = self._queries or QueryStatistics(self.info, self.window)
            self._queries.add(query, self.lengths)
        self.settle()
        self.prompt.leave(self.zones, self.store)

    def refuse_other_padding(self, mask: Tensor) -> None:
        """Raise ModelError where the first step's mask [B, 1, 1, n] does not leave the tokens that are held."""
        real = [int(count) - 1 for count in mask[:, 0, 0].sum(dim=-1).tolist()]
        if real != self.lengths:
            raise ModelError(
                f"layer {self.info.index}: the attention mask speaks of {real} tokens a row, the cache holds "
                f"{self.lengths}: padding went through the model one token at a time; use prefill_chunk_size > 1, "
                f"and a mask with padding on the left only"
            )

    def end_prefill(self) -> None:
        """Leave the prompt: fit and encode what waited for it, sink and ring to the device."""
        prompt = self.prompt
        assert prompt is not None
        self._fit_and_encode()
        ring = max(self._ring_capacity(tokens, tokens + self.request.new_tokens) for tokens in self.lengths)
        self.device = DeviceRows(self.info, self.window, ring, self.pipeline.slots(self.info.group))
        for row, (tokens, zone) in enumerate(zip(self.lengths, self.zones, strict=True)):
            first = min(self.window.sink, tokens)
            for start, stop in ((0, first), (first + zone, tokens)):
                keys, values = prompt.read(row, start, stop)
                self.device.place(row, start, torch.stack((keys, values), dim=2))
        self.prompt = None
        self.active_rows = [True] * self.info.batch
        self._publish_zones()

    def _ring_capacity(self, tokens: int, final_tokens: int) -> int:
        if self.pipeline.indexes == "prompt":
            zone = self.window.zone(tokens)
            return max(1, self.window.ring(final_tokens, zone))
        return self.window.ring_capacity(tokens, final_tokens)

    # Moving tokens into the zone: `update`

    def settle(self) -> None:
        """Move every block that is due from the prompt or the ring into the zone. Between steps only."""
        due: dict[int, list[int]] = {}
        for row, tokens in enumerate(self.lengths):
            if more := self._zone(row, tokens) - self.zones[row]:
                due.setdefault(more, []).append(row)
        for more, rows in due.items():
            self._move(rows, more)
        if due and self.device is not None:
            self._fit_and_encode()
            self._publish_zones()
        self._keep_a_free_slot()

    def _zone(self, row: int, tokens: int) -> int:
        if self.pipeline.indexes == "prompt" and self.decoding:
            return self.zones[row]
        return self.window.zone(tokens)

    def _move(self, rows: list[int], tokens: int) -> None:
        """The oldest `tokens` tokens outside the zone of each of the rows: encode them, append them."""
        starts = [self.zones[row] for row in rows]
        self._reserve(max(starts) + tokens)
        pairs = [self._read(row, self.window.sink + start, tokens) for row, start in zip(rows, starts, strict=True)]
        keys = _as_batch([keys for keys, _ in pairs])
        values = _as_batch([values for _, values in pairs])
        for encoder in self.pipeline.encoders:
            fitted = self._fitted[encoder.name]
            ready = [i for i, row in enumerate(rows) if encoder.fit is None or row in fitted]
            if len(ready) == len(rows):
                self._encode(encoder, rows, starts, keys, values)
            elif ready:
                self._encode(encoder, [rows[i] for i in ready], [starts[i] for i in ready], keys[ready], values[ready])
        assert self.store is not None
        assert self.pipeline.update is not None
        self.pipeline.update(keys, values, self.store, rows)
        for row in rows:
            self.zones[row] += tokens
        if self.decoding:
            for encoder in self.pipeline.encoders:
                self._forget_stale(encoder, rows, keys)

    def _read(self, row: int, start: int, tokens: int) -> tuple[Tensor, Tensor]:
        if self.prompt is not None:
            return self.prompt.read(row, start, start + tokens)
        assert self.device is not None
        return _split(self.device.read(row, start, start + tokens))

    def _encode(self, encoder: Encoder, rows: list[int], starts: list[int], keys: Tensor, values: Tensor) -> None:
        state = {name: tensor[rows] for name, tensor in self.states.get(encoder.name, {}).items()}
        block = encoder.encode(keys, values, state)
        try:
            self.codes[encoder.name].append(rows, starts, block, keys.shape[2])
        except ShapeError as error:
            error.add_note(f"what encode of retriever {encoder.name!r} returned, layer {self.info.index}")
            raise

    def _forget_stale(self, encoder: Encoder, rows: list[int], keys: Tensor) -> None:
        """Take those rows as not fitted whose state no longer suits the keys [R, H, n, D] that have just moved."""
        fitted = self._fitted[encoder.name]
        moved = [i for i, row in enumerate(rows) if row in fitted]
        if encoder.is_stale is None or not moved:
            return
        asked = [rows[i] for i in moved]
        state = {name: tensor[asked] for name, tensor in self.states[encoder.name].items()}
        then = [fitted[row] for row in asked]
        since = [self.zones[row] - tokens for row, tokens in zip(asked, then, strict=True)]
        stale = encoder.is_stale(keys if len(moved) == len(rows) else keys[moved], state, then, since)
        for row, is_stale in zip(asked, stale, strict=True):
            if is_stale:
                del fitted[row]
                self.codes[encoder.name].forget_sums(row)
                self.refits += 1

    def _fit_and_encode(self) -> None:
        """Fit the formats that learn from the zone to the rows that are new to them, and encode these rows."""
        for encoder in self.pipeline.encoders:
            fitted = self._fitted[encoder.name]
            rows = [row for row, zone in enumerate(self.zones) if zone and row not in fitted]
            if encoder.fit is None or not rows:
                continue
            assert self.store is not None
            view = self._view(encoder.needs, rows)
            self._keep_state(encoder.name, encoder.fit(self.info, view), rows)
            fitted.update((row, self.zones[row]) for row in rows)
            for row in rows:
                self._encode_from_store(encoder, row, view)

    def _view(self, needs: frozenset[Need], rows: list[int]) -> PromptView:
        """The zones of the rows as `fit` sees them."""
        store, prompt, window = self.store, self.prompt, self.window
        assert store is not None

        def read(row: int, start: int, stop: int) -> Pair:
            if isinstance(prompt, BufferedPrompt):
                return prompt.read(row, window.sink + start, window.sink + stop)
            return store.read(row, start, stop)

        def dense(row: int) -> Pair:
            if prompt is None:
                return _as_pair(self._steady(row))
            tokens, first = self.lengths[row], min(window.sink, self.lengths[row])
            return _as_pair((prompt.read(row, 0, first), prompt.read(row, first + self.zones[row], tokens)))

        request = self.request
        moment = request.moments.get(self.info.index)
        return PromptView(self.info, window, store, needs, rows, read, dense, self._queries, request.rotary, moment)

    def _keep_state(self, name: str, new: Tensors, rows: list[int]) -> None:
        """Only the given rows are taken over, in place: a captured step reads them where they are."""
        state = self.states.setdefault(name, {key: torch.zeros_like(tensor) for key, tensor in new.items()})
        for key, tensor in new.items():
            state[key][rows] = tensor[rows]

    def _encode_from_store(self, encoder: Encoder, row: int, view: PromptView) -> None:
        start = 0
        for keys, values in view.blocks(row):
            self._encode(encoder, [row], [start], keys.unsqueeze(0), values.unsqueeze(0))
            start += keys.shape[1]

    # Room, and what the stages read of it

    def _reserve(self, zone: int) -> None:
        """Make sure that codes and store have room for a zone of `zone` tokens."""
        if self.store is None:
            assert self.pipeline.allocate_store is not None
            capacity = max(zone, self.window.zone(self.request.prompt_tokens + self.request.new_tokens))
            self.store = self.pipeline.allocate_store(self.info, capacity)
            for encoder in self.pipeline.encoders:
                codes = encoder.allocate_codes(self.info, capacity)
                codes.length = self.zone_length
                self.codes[encoder.name] = codes
        elif zone > self.store.capacity:
            capacity = zone + max(self.window.update, zone // 8 // self.window.update * self.window.update)
            self.store.grow(capacity)
            for codes in self.codes.values():
                codes.grow(capacity)

    def _publish_zones(self) -> None:
        """Tell the device what the zone now is: lengths, budget, which ring slots are valid."""
        self.zone_length.copy_(_integers(tuple(self.zones), self.info.device))
        if self.store is not None:
            rule, top_k = self.pipeline.candidates, self.pipeline.top_k
            counts = tuple(rule.count(zone, top_k) for zone in self.zones)
            self.budget.count.copy_(_integers(counts, self.info.device))
            self.budget = Budget(rule.width(self.store.capacity, top_k), self.budget.count)
        assert self.device is not None
        for row, (tokens, zone) in enumerate(zip(self.lengths, self.zones, strict=True)):
            self.device.publish(row, tokens, zone)

    def _keep_a_free_slot(self) -> None:
        """Grow a ring that is full: only where nothing leaves it, or where the request outlives its plan."""
        if self.device is None:
            return
        fill = max(self.window.ring(n, zone) for n, zone in zip(self.lengths, self.zones, strict=True))
        if fill >= self.device.ring:
            ring = fill + max(HEADROOM, fill // 8)
            try:
                self.device = self.device.grown(self.info, ring, self.lengths, self.zones)
            except (RuntimeError, MemoryError) as error:
                raise CapacityError(
                    f"layer {self.info.index}: no memory to grow the ring from {self.device.ring} to {ring} slots "
                    f"after {max(self.lengths)} tokens; lower max_new_tokens or dense_below, or use fewer dense layers"
                ) from error

    @property
    def shape(self) -> tuple[object, ...]:
        """What a captured step has baked in; sizes, addresses and whether there is something to retrieve."""
        capacity = self.store.capacity if self.store is not None else 0
        return self.retrieves, self.device and self.device.serial, capacity, self.budget.width

    @property
    def attended(self) -> float:
        """Tokens that a query head attends to, mean over the steps and rows; 0 before the first step."""
        steady_and_selected = self.steady + int(self.selected.sum()) / self.info.kv_heads
        return steady_and_selected / (self.steps * self.info.batch) if self.steps else 0.0

    def codes_of(self, name: str | None) -> Codes:
        """The codes of a producer; of none, codes that hold nothing but the lengths."""
        return self._no_codes if name is None else self.codes[name]

    def state_of(self, name: str) -> Tensors:
        """What a format learnt from the prompt; empty where it learns nothing."""
        return self.states.get(name, {})

    @property
    def code_bytes(self) -> int:
        return sum(codes.nbytes for codes in self.codes.values())


@lru_cache(maxsize=64)
def _integers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 on the device; all layers of a request ask for the same in turn."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def count_selected(layers: Iterable[LayerState]) -> None:
    """Add to the layers' counters what the step selected, in a few operations for all of them together."""
    due = [layer for layer in layers if layer._in_step and not layer._is_counted and layer.chosen is not None]
    if due:
        chosen = _as_integers([layer.chosen for layer in due if layer.chosen is not None])
        counters = [layer.selected[..., : one.shape[-1]] for layer, one in zip(due, chosen, strict=True)]
        torch._foreach_add_(counters, chosen)  # type: ignore[arg-type]  # its stub knows numbers only
    for layer in due:
        layer._is_counted = True


def _as_integers(flags: list[Tensor]) -> Sequence[Tensor]:
    """Flags [B, H, K] as int32: at once where they have one size."""
    if len({flag.shape for flag in flags}) == 1:
        return torch.stack(flags).int().unbind()
    return [flag.int() for flag in flags]


def _split(rows: Tensor) -> Pair:
    """Rows [H, n, 2, D] as keys and values [H, n, D]."""
    return rows[:, :, 0], rows[:, :, 1]


def _as_pair(pieces: Iterable[Pair]) -> Pair:
    """Keys and values [H, n, D] of the pieces, one after the other."""
    keys, values = zip(*pieces, strict=True)
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)


def _as_batch(rows: list[Tensor]) -> Tensor:
    """Rows as one tensor [R, ...]; a single row, a prompt's usual case, is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)
