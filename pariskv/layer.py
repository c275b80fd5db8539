"""The state of one attention layer of a request: its rows on the device, and its zone.

What changes per token lives here. A layer is either reading a prompt (`prompt` is set) or decoding
(`device` is set); `append` is the way in for both, `settle` moves what is due into the zone.
Between steps rows go back (`crop`) or become another request's (`take_row`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pariskv.binding import LayerPipeline
from pariskv.counting import count_selected
from pariskv.errors import CapacityError, ModelError
from pariskv.fork import forked
from pariskv.history import StreamedPrompt
from pariskv.hookspecs import Need
from pariskv.pairs import Pair, as_batch, as_pair, split
from pariskv.prompt import BufferedPrompt, History, Prompt, PromptView, QueryStatistics
from pariskv.request import HEADROOM, Request
from pariskv.types import Budget, Codes, LayerInfo, Store
from pariskv.window import Window
from pariskv.working import DeviceRows
from pariskv.zone import Zone


class LayerState:
    """Everything that one layer of one request holds.

    lengths  host integers, the tokens of each row; `zones`: how many of them are in the zone
    """

    def __init__(self, info: LayerInfo, pipeline: LayerPipeline, window: Window, request: Request):
        self.info = info
        self.pipeline = pipeline
        self.window = window.suited_to(pipeline.indexes)
        self.request = request
        self.zone = Zone(info, pipeline, self.window.update)
        # How often each slot held a selected row; see `count_selected`. Nobody sums it before `attended` is asked for.
        slots = pipeline.slots(info.group)
        self.selected = torch.zeros(info.batch, info.kv_heads, slots, dtype=torch.int32, device=info.device)
        self._begin()

    def _begin(self) -> None:
        """With rows that hold nothing."""
        self.lengths = [0] * self.info.batch
        self.active_rows = [True] * self.info.batch
        self.columns = 0  # of the model: real tokens and padding
        self.in_step = self.is_counted = False
        self.steps = 0
        self.steady = 0  # sink and ring tokens attended to, summed over steps and rows
        self.chosen: Tensor | None = None  # which slots hold a row in the last step; a graph writes it anew
        self.prompt: Prompt | None = None
        self.prefill_history: History = "buffer"  # how the last prompt was read
        self.device: DeviceRows | None = None
        self.queries: QueryStatistics | None = None

    # The zone, as stages and reports read it

    @property
    def zones(self) -> list[int]:
        """Tokens of each row's zone."""
        return self.zone.lengths

    @property
    def store(self) -> Store | None:
        return self.zone.store

    @property
    def budget(self) -> Budget:
        return self.zone.budget

    @property
    def codes(self) -> dict[str, Codes]:
        return self.zone.codes

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
        self.in_step, self.is_counted = True, False

    def finish_step(self) -> None:
        """Count the step that was appended, and move what is due: by the loop between two steps, else by the next."""
        if not self.in_step:
            return
        count_selected([self])
        self.in_step = False
        self.lengths = [n + is_active for n, is_active in zip(self.lengths, self.active_rows, strict=True)]
        self.steps += 1
        self.steady += sum(self.lengths) - sum(self.zones)
        self.settle()

    def set_active(self, active_rows: list[bool]) -> None:
        """Say which rows still generate; the others keep their length and retrieve nothing. Between steps only."""
        if active_rows != self.active_rows:
            assert self.device is not None
            self.active_rows = list(active_rows)
            self.device.active.copy_(torch.tensor(active_rows))
            self.zone.publish(active_rows)

    # Reading a prompt

    def _begin_prompt(self, chunk: int) -> None:
        """Start reading, with the history in front where this is a later turn."""
        self.finish_step()
        history = self.columns - chunk
        expected = max(self.columns, self.request.prompt_tokens)
        if self.pipeline.indexes != "none" and self.request.history(self.info.batch, expected) == "store":
            streamed = StreamedPrompt(self.info, self.window.sink)
            if history:
                held = [as_pair(self._steady(row)) for row in range(self.info.batch)]
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
        return split(self.device.read(row, 0, first)), split(self.device.read(row, first + zone, tokens))

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
            self.queries = self.queries or QueryStatistics(self.info, self.window)
            self.queries.add(query, self.lengths)
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
        self.zone.fit(self._view)
        ring = max(self.window.ring_capacity(tokens, tokens + self.request.new_tokens) for tokens in self.lengths)
        self.device = DeviceRows(self.info, self.window, ring, self.pipeline.slots(self.info.group))
        for row, (tokens, zone) in enumerate(zip(self.lengths, self.zones, strict=True)):
            first = min(self.window.sink, tokens)
            for start, stop in ((0, first), (first + zone, tokens)):
                keys, values = prompt.read(row, start, stop)
                self.device.place(row, start, torch.stack((keys, values), dim=2))
        self.prompt = None
        self.active_rows = [True] * self.info.batch
        self._publish()

    # Moving tokens into the zone: `update`

    def settle(self) -> None:
        """Move every block that is due from the prompt or the ring into the zone. Between steps only."""
        due: dict[int, list[int]] = {}
        for row, (tokens, zone) in enumerate(zip(self.lengths, self.zones, strict=True)):
            if more := (self.window.zone_from(zone, tokens) if self.decoding else self.window.zone(tokens)) - zone:
                due.setdefault(more, []).append(row)
        for more, rows in due.items():
            self._move(rows, more)
        if due and self.device is not None:
            self.zone.fit(self._view)
            self._publish(itertools.chain(*due.values()))
        self._keep_a_free_slot()

    def _move(self, rows: list[int], tokens: int) -> None:
        """The oldest `tokens` tokens outside the zone of each of the rows: encode them, append them."""
        starts = [self.zones[row] for row in rows]
        self.zone.reserve(max(starts) + tokens, self.planned_zone)
        pairs = [self._read(row, self.window.sink + start, tokens) for row, start in zip(rows, starts, strict=True)]
        keys = as_batch([keys for keys, _ in pairs])
        self.zone.append(rows, keys, as_batch([values for _, values in pairs]))
        if self.decoding:
            self.zone.forget_stale(rows, keys)

    @property
    def planned_zone(self) -> int:
        """Tokens that a row's zone will have in the end, as far as anybody knows."""
        return self.window.zone(self.request.prompt_tokens + self.request.new_tokens)

    def _read(self, row: int, start: int, tokens: int) -> Pair:
        if self.prompt is not None:
            return self.prompt.read(row, start, start + tokens)
        assert self.device is not None
        return split(self.device.read(row, start, start + tokens))

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
                return as_pair(self._steady(row))
            tokens, first = self.lengths[row], min(window.sink, self.lengths[row])
            return as_pair((prompt.read(row, 0, first), prompt.read(row, first + self.zones[row], tokens)))

        request = self.request
        moment = request.moments.get(self.info.index)
        return PromptView(self.info, window, store, needs, rows, read, dense, self.queries, request.rotary, moment)

    # Rows come and go

    def open_rows(self) -> None:
        """Begin to decode with rows that hold nothing and are not active: `take_row` fills them."""
        self.device = DeviceRows(self.info, self.window, 1, self.pipeline.slots(self.info.group))
        self.active_rows = [False] * self.info.batch
        self.device.active.zero_()
        self._publish()

    def clear(self) -> None:
        """Forget everything, for another prompt in the same rows; the room of the zone is kept.

        Raises PluginContractError where the store cannot forget.
        """
        for row in range(self.info.batch):
            self.zone.crop(row, 0)
        self.selected.zero_()
        self._begin()

    def crop(self, row: int, tokens: int) -> None:
        """Forget the row's tokens from `tokens` on; what left for the zone since then comes back into the ring.

        Raises PluginContractError or BindingError where the store cannot give back, or forget, what it holds.
        """
        assert self.device is not None
        if tokens >= self.lengths[row]:
            return
        sink, zone = self.window.sink, self.zones[row]
        left = min(zone, self.window.zone_before(tokens))
        returning = min(sink + zone, tokens) - (sink + left)
        rows = None
        if returning > 0:
            assert self.store is not None
            keys, values = self.store.read(row, left, left + returning)
            rows = torch.stack((keys, values), dim=2)
            self._make_room(self.window.ring(tokens, left))
        self.lengths[row] = tokens
        self.zone.crop(row, left)
        if rows is not None:
            self.device.place(row, sink + left, rows)
        if self.queries is not None:
            self.queries.crop(row, tokens)
        self._publish([row])

    def take_row(self, row: int, source: LayerState, source_row: int, common: int = 0) -> None:
        """Make a row hold what another one does, of this layer or of the same layer of another request.

        common  tokens at the beginning that both have in common, which are not copied again
        Raises PluginContractError where the store cannot change its rows.
        """
        assert self.device is not None
        assert source.device is not None
        tokens, zone, update = source.lengths[source_row], source.zones[source_row], self.window.update
        self._make_room(self.window.ring(tokens, zone), source.device.ring)
        if zone:
            self.zone.reserve(zone, self.planned_zone)
        self.zone.take_row(row, source.zone, source_row, max(0, common - self.window.sink) // update * update)
        self._take_steady(row, source, source_row)
        self._publish([row])

    def _take_steady(self, row: int, source: LayerState, source_row: int) -> None:
        """Make a row hold another's sink and ring, whose zone it has already, and what is known of its queries."""
        assert self.device is not None
        assert source.device is not None
        tokens, zone = source.lengths[source_row], source.zones[source_row]
        first = min(self.window.sink, tokens)
        for start, stop in ((0, first), (first + zone, tokens)):
            self.device.place(row, start, source.device.read(source_row, start, stop))
        self.lengths[row] = tokens
        if source.queries is not None:
            self.queries = self.queries or QueryStatistics(self.info, self.window)
            self.queries.take_row(row, source.queries, source_row)

    def fork(self, request: Request) -> LayerState:
        """The same layer of another request, which holds the same; the zone's rows and codes are shared."""
        assert self.device is not None
        self.pipeline = self.zone.pipeline = forked(self.pipeline)
        other = LayerState(self.info, self.pipeline, self.window, request)
        other.columns, other.active_rows = self.columns, list(self.active_rows)
        other.device = DeviceRows(self.info, self.window, self.device.ring, self.pipeline.slots(self.info.group))
        other.device.active.copy_(self.device.active)
        other.zone.share(self.zone)
        for row in range(self.info.batch):
            other._take_steady(row, self, row)
        for layer in (self, other):
            layer._publish()
        return other

    # Room, and what the stages read of it

    def _publish(self, rows: Iterable[int] | None = None) -> None:
        """Tell the device what rows (None: all) and zones now are: lengths, budgets, which ring slots are valid."""
        self.zone.publish(self.active_rows)
        assert self.device is not None
        for row in range(self.info.batch) if rows is None else rows:
            self.device.publish(row, self.lengths[row], self.zones[row])

    def _keep_a_free_slot(self) -> None:
        """Grow a ring that is full: only where nothing leaves it, or where the request outlives its plan."""
        if self.device is None:
            return
        self._make_room(max(self.window.ring(n, zone) for n, zone in zip(self.lengths, self.zones, strict=True)))

    def _make_room(self, fill: int, planned: int = 0) -> None:
        """Let the ring have a free slot beside `fill` tokens of a row, and `planned` slots at least."""
        assert self.device is not None
        if max(fill + 1, planned) <= self.device.ring:
            return
        ring = planned if planned > fill else fill + max(HEADROOM, fill // 8)
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
        layout = self.store.layout if self.store is not None else 0
        return self.retrieves, self.device and self.device.serial, layout, self.budget.width

    @property
    def attended(self) -> float:
        """Tokens that a query head attends to, mean over the steps and rows; 0 before the first step."""
        steady_and_selected = self.steady + int(self.selected.sum()) / self.info.kv_heads
        return steady_and_selected / (self.steps * self.info.batch) if self.steps else 0.0

    @property
    def code_bytes(self) -> int:
        return self.zone.code_bytes
