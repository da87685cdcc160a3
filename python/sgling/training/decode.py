"""Batched token-by-token generation with the training model: KDA states, cached MLA keys, one CUDA graph a step.

Prompts are fed token by token too, so sequences of different length share a batch and need no separate prefill.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import ops
from .model import KDA, MLA, Pico, kda_outputs, mla_outputs
from .ops import linear, rms_norm


class Decoder:
    """Generates for ``prompts`` (lists of ids) up to ``length`` tokens in all. ``temperature`` 0 means greedy."""

    def __init__(
        self, model: Pico, prompts: list[list[int]], length: int, stop: tuple[int, int], temperature: float = 0.0
    ) -> None:
        """``stop``: (end id, pad id)."""
        self.model, self.length, self.stop, self.temperature = model, length, stop, temperature
        device = model.norm.device
        count = len(prompts)
        self.text = torch.full((count, length + 1), stop[1], dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            self.text[row, : len(prompt)] = torch.tensor(prompt, device=device)
        self.prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.time = torch.zeros(1, dtype=torch.int64, device=device)
        self.done = torch.zeros(count, dtype=torch.bool, device=device)
        self.caches = [self._cache(layer.attention, count, device) for layer in model.layers]
        self.slots = torch.arange(length, device=device)

    def _cache(self, attention: KDA | MLA, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        config, dtype = self.model.config, self.model.dtype
        heads, size = config.num_attention_heads, config.head_dim
        if isinstance(attention, KDA):
            return (
                torch.zeros(count, config.short_conv_kernel_size - 1, 3 * heads * size, dtype=dtype, device=device),
                torch.zeros(count, heads, size, size, dtype=torch.float32, device=device),
            )
        shape = (count, self.length, heads)
        return (
            torch.zeros(*shape, config.qk_head_dim, dtype=dtype, device=device),
            torch.zeros(*shape, config.v_head_dim, dtype=dtype, device=device),
        )

    def _kda(self, x: torch.Tensor, kda: KDA, window: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        h = rms_norm(x, kda.input_norm, kda.eps)
        width = kda.qkvfg.shape[1]
        qkv, f, z = linear(h, kda.qkvfg.flatten(0, 1)).split((3 * width, width, width), dim=-1)
        taps = torch.cat((window, qkv.unsqueeze(1)), dim=1)
        window.copy_(taps[:, 1:])
        qkv = F.silu((taps.float() * kda.conv.float().T).sum(1)).to(x.dtype)
        q, k, v = (part.unflatten(-1, (kda.heads, -1)) for part in qkv.chunk(3, dim=-1))
        q, k = ops.l2_normalize(q) * q.shape[-1] ** -0.5, ops.l2_normalize(k)
        g = ops.log_decay(f.unflatten(-1, (kda.heads, -1)), kda.a_log, kda.dt_bias, kda.bound)
        beta = torch.sigmoid(linear(h, kda.beta).float())
        state.mul_(g.exp().unsqueeze(-1))
        update = beta.unsqueeze(-1) * (v.float() - torch.einsum("bhk,bhkv->bhv", k, state))
        state.add_(k.unsqueeze(-1) * update.unsqueeze(-2))
        o = torch.einsum("bhk,bhkv->bhv", q, state).to(x.dtype)
        return kda_outputs(x, o, z, kda.o_norm, kda.eps, kda.o_proj)

    def _mla(self, x: torch.Tensor, mla: MLA, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q, k, v, gate = mla.inputs(x, self.time.expand(x.shape[0]))
        keys.index_copy_(1, self.time, k.unsqueeze(1))
        values.index_copy_(1, self.time, v.unsqueeze(1))
        scores = torch.einsum("bhd,bthd->bht", q, keys).float() * q.shape[-1] ** -0.5
        scores = scores.masked_fill(self.slots > self.time, float("-inf"))
        o = torch.einsum("bht,bthv->bhv", scores.softmax(-1).to(x.dtype), values)
        return mla_outputs(x, o, gate, mla.dense)

    def step(self) -> None:
        """Consumes the token at ``time`` and writes the one behind it, unless that is still prompt."""
        model = self.model
        x = model.embed(self.text.index_select(1, self.time).squeeze(1))
        for layer, (first, second) in zip(model.layers, self.caches, strict=True):
            run = self._kda if isinstance(layer.attention, KDA) else self._mla
            x = layer.ffn(run(x, layer.attention, first, second))
        logits = linear(rms_norm(x, model.norm, model.config.rms_norm_eps), model.head).float()
        if self.temperature > 0:
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-10, 1 - 1e-7)))
            logits = logits / self.temperature + noise
        following = self.time + 1
        given = following < self.prompt_lengths
        chosen = torch.where(self.done, self.stop[1], logits.argmax(-1))
        chosen = torch.where(given, self.text.index_select(1, following).squeeze(1), chosen)
        self.text.index_copy_(1, following, chosen.unsqueeze(1))
        self.done |= (chosen == self.stop[0]) & ~given
        self.time += 1

    @torch.no_grad()
    def run(self) -> list[list[int]]:
        """Generated ids per prompt, without the end token (missing end: the text ran into the limit)."""
        self.model.eval()
        replay = self.step
        if self.text.is_cuda:
            self.step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            replay = graph.replay
        for index in range(1 if self.text.is_cuda else 0, self.length):
            replay()
            if index % 64 == 0 and bool(self.done.all()):
                break
        texts = []
        for row, start in zip(self.text.tolist(), self.prompt_lengths.tolist(), strict=True):
            ids = row[start:]
            ends = [index for index, token in enumerate(ids) if token in self.stop]
            texts.append(ids[: ends[0]] if ends else ids)
        return texts
