"""Answers written by the target: many conversations at a time with the training forward, or through sgling.Engine.

An answer is a function of (prompt, seed, temperature): the noise is keyed by (seed, position, token), as in the server.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from sgling_kernel.noise import gumbel_noise

from ..decode import Decoder
from ..model import KDA, MLA, Pico, mla_outputs
from ..ops import linear, rms_norm
from .conversations import Prompt
from .rows import Sample
from .target import Target

CHECK_EVERY = 16
"""Decode steps between two looks at which conversations have ended."""


class Limits(NamedTuple):
    """Longest conversation and answer, tokens; conversations at a time."""

    length: int
    new_tokens: int
    slots: int


class SlotDecoder(Decoder):
    """Decoder whose rows are slots, each at its own position; a finished slot takes the next conversation."""

    def __init__(self, model: Pico, limits: Limits, stop: tuple[int, int], sampled: bool) -> None:
        """``stop``: (end id, pad id); ``sampled`` False leaves the noise out: every temperature must be 0."""
        super().__init__(model, [[stop[1]]] * limits.slots, limits.length, stop)
        device = self.text.device
        self.sampled = sampled
        self.rows = torch.arange(limits.slots, device=device)
        self.times = torch.zeros(limits.slots, dtype=torch.int64, device=device)
        self.ends = torch.zeros_like(self.times)
        self.seeds = torch.zeros_like(self.times)
        self.temperatures = torch.zeros(limits.slots, device=device)
        self.done.fill_(True)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _cache(self, attention: KDA | MLA, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads before positions, so that a batched product reads the cache without a copy."""
        first, second = super()._cache(attention, count, device)
        if isinstance(attention, KDA):
            return first, second
        return first.transpose(1, 2).contiguous(), second.transpose(1, 2).contiguous()

    def put(self, slots: list[int], prompts: list[list[int]], keys: list[tuple[int, float, int]]) -> None:
        """Start conversations in free slots; ``keys``: (seed, temperature, last position) of each."""
        device = self.text.device
        where = torch.tensor(slots, device=device)
        rows = torch.full((len(slots), self.text.shape[1]), self.stop[1], dtype=torch.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self.text[where] = rows.to(device)
        self.prompt_lengths[where] = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.seeds[where] = torch.tensor([seed for seed, _, _ in keys], device=device)
        self.temperatures[where] = torch.tensor([value for _, value, _ in keys], device=device)
        self.ends[where] = torch.tensor([last for _, _, last in keys], device=device)
        self.times[where] = 0
        self.done[where] = False
        for layer, (window, state) in zip(self.model.layers, self.caches, strict=True):
            if isinstance(layer.attention, KDA):
                window[where] = 0
                state[where] = 0

    def _mla(self, x: torch.Tensor, mla: MLA, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v, gate = mla.inputs(x, self.times)
        keys[self.rows, :, self.times] = k
        values[self.rows, :, self.times] = v
        scores = (keys @ q.unsqueeze(-1)).squeeze(-1).float() * q.shape[-1] ** -0.5
        scores = scores.masked_fill(self.slots > self.times[:, None, None], float("-inf"))
        o = (scores.softmax(-1).to(x.dtype).unsqueeze(-2) @ values).squeeze(-2)
        return mla_outputs(x, o, gate, mla.dense)

    def step(self) -> None:
        """Every running slot consumes the token at its position and writes the one behind it, unless that is prompt."""
        model = self.model
        x = model.embed(self.text[self.rows, self.times])
        for layer, (first, second) in zip(model.layers, self.caches, strict=True):
            run = self._kda if isinstance(layer.attention, KDA) else self._mla
            x = layer.ffn(run(x, layer.attention, first, second))
        logits = linear(rms_norm(x, model.norm, model.config.rms_norm_eps), model.head).float()
        if self.sampled:
            heat = self.temperatures.unsqueeze(-1)
            noise = gumbel_noise(self.seeds, self.times, 0, logits.shape[-1])
            logits = torch.where(heat > 0, logits / heat.clamp_min(1e-5) + noise, logits)
        following = self.times + 1
        given = following < self.prompt_lengths
        old = self.text[self.rows, following]
        chosen = torch.where(given | self.done, old, logits.argmax(-1))
        self.text[self.rows, following] = chosen
        self.done |= ((chosen == self.stop[0]) & ~given) | (following >= self.ends)
        self.times += (~self.done).long()

    def advance(self, steps: int) -> None:
        """Several steps, on a GPU as replays of one captured graph."""
        if self.text.is_cuda and self.graph is None:
            self.step()
            steps -= 1
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.step()
        for _ in range(steps):
            self.step() if self.graph is None else self.graph.replay()


class Answered(NamedTuple):
    """A finished conversation: number in the order of the prompts, all ids, tokens of its prompt."""

    index: int
    ids: list[int]
    prompt_length: int
    temperature: float

    def sample(self) -> Sample:
        """Supervised: what the target wrote, its end token included."""
        answer = np.zeros(len(self.ids), dtype=bool)
        answer[self.prompt_length :] = True
        return Sample(np.array(self.ids, dtype=np.int32), answer, True, self.temperature)


class BatchedGenerator:
    """Answers prompts with the training forward, as many at a time as there are slots."""

    def __init__(self, target: Target, limits: Limits, settings: tuple[float, ...], seed: int) -> None:
        self.target, self.limits, self.settings, self.seed = target, limits, settings, seed
        text = target.text
        sampled = any(temperature > 0 for temperature in settings)
        self.decoder = SlotDecoder(target.model, limits, (text.end, text.pad), sampled)

    def key(self, index: int, prompt: list[int]) -> tuple[int, float, int]:
        """(noise seed, temperature, last position) of a prompt by its number."""
        last = min(self.limits.length, len(prompt) + self.limits.new_tokens) - 1
        return self.seed * 1_000_003 + index, self.settings[index % len(self.settings)], last

    @torch.no_grad()
    def answers(self, prompts: Iterable[Prompt], first: int = 0, until: float | None = None) -> Iterator[Answered]:
        """Finished conversations in the order they end; prompts that leave no room for an answer are skipped.

        Args:
            first: number of the first prompt, which keys its noise.
            until: ``time.monotonic()`` at which to stop; unfinished conversations are dropped.
        """
        decoder, waiting = self.decoder, enumerate(prompts, first)
        running: dict[int, tuple[int, int, float]] = {}
        free = list(range(self.limits.slots))
        decoder.done.fill_(True)
        while True:
            self._fill(waiting, free, running)
            if not running or (until is not None and time.monotonic() > until):
                return
            decoder.advance(CHECK_EVERY)
            ended = [slot for slot in decoder.done.nonzero().flatten().tolist() if slot in running]
            if ended:
                texts = decoder.text[torch.tensor(ended, device=decoder.text.device)].tolist()
                lasts = decoder.times[torch.tensor(ended, device=decoder.text.device)].tolist()
                for slot, ids, last in zip(ended, texts, lasts, strict=True):
                    index, length, temperature = running.pop(slot)
                    yield Answered(index, ids[: last + 2], length, temperature)
                free += ended

    def close(self) -> None:
        """Nothing to stop."""

    def _fill(self, waiting: Iterator[tuple[int, Prompt]], free: list[int], running: dict) -> None:
        slots, prompts, keys = [], [], []
        while free and (item := next(waiting, None)) is not None:
            index, prompt = item
            if len(prompt.ids) > self.limits.length - 16:
                continue
            slots.append(free.pop())
            prompts.append(prompt.ids)
            keys.append(self.key(index, prompt.ids))
            running[slots[-1]] = (index, len(prompt.ids), keys[-1][1])
        if slots:
            self.decoder.put(slots, prompts, keys)


class EngineGenerator:
    """The same answers through ``sgling.Engine``, for any target it serves."""

    def __init__(self, target: Target, limits: Limits, settings: tuple[float, ...], seed: int) -> None:
        from sgling import Engine

        self.batched, self.limits, self.settings, self.seed = limits.slots, limits, settings, seed
        self.engine = Engine(
            model_path=str(target.text.directory),
            device=target.device,
            max_running_requests=limits.slots,
            random_seed=seed,
            log_level="warning",
        )

    def answers(self, prompts: Iterable[Prompt], first: int = 0, until: float | None = None) -> Iterator[Answered]:
        """See :meth:`BatchedGenerator.answers`."""
        waiting = enumerate(prompts, first)
        while until is None or time.monotonic() < until:
            wave = [item for _, item in zip(range(self.batched), waiting, strict=False)]
            if not wave:
                return
            fitting = [(index, prompt) for index, prompt in wave if len(prompt.ids) <= self.limits.length - 16]
            if fitting:
                yield from self._wave(fitting)

    def _wave(self, wave: list[tuple[int, Prompt]]) -> Iterator[Answered]:
        params = []
        for index, prompt in wave:
            room = min(self.limits.new_tokens, self.limits.length - len(prompt.ids))
            params.append(
                {
                    "temperature": self.settings[index % len(self.settings)],
                    "max_new_tokens": room,
                    "sampling_seed": self.seed * 1_000_003 + index,
                }
            )
        answers = self.engine.generate(input_ids=[prompt.ids for _, prompt in wave], sampling_params=params)
        for (index, prompt), answer, setting in zip(wave, answers, params, strict=True):
            ids = [*prompt.ids, *answer["output_ids"]]
            yield Answered(index, ids, len(prompt.ids), setting["temperature"])

    def close(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()
