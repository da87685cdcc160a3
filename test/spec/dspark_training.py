"""Trains a tiny drafter on what the tiny target says, in seconds: enough to be accepted often on those very prompts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.nn import functional as F

from model.driver import Driver, load
from model.tiny_drafter import drafter_config, drafter_tensors
from model.tiny_model import write_tensors
from sgling.srt.config.dspark_config import DSparkConfig
from spec import dspark_reference
from spec.dspark_reference import Params


def write_trained_drafter(
    target: Path, directory: Path, sequences: list[tuple[list[int], list[int]]], steps: int = 100, **overrides
) -> Path:
    """Fit a drafter to (prompt, answer) pairs and write it in the public format; returns the directory."""
    raw = drafter_config(**overrides)
    config = DSparkConfig.from_dict(raw)
    params = {name: value.float().requires_grad_() for name, value in drafter_tensors(raw).items()}
    model = load(target, tap_layers=config.target_layer_ids)
    head, embedding = model.target.logits_processor.weight, model.target.embed_tokens.weight
    examples = [_example(model, config, prompt, answer) for prompt, answer in sequences]
    optimizer = torch.optim.AdamW(params.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        taps, ids, first = examples[step % len(examples)]
        optimizer.zero_grad()
        _loss(params, config, (taps, ids, first), head, embedding).backward()
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    write_tensors(directory, {name: value.detach().to(torch.bfloat16) for name, value in params.items()})
    return directory


def _example(model, config: DSparkConfig, prompt: list[int], answer: list[int]):
    """(taps, ids, first anchor) of one sequence."""
    ids = [*prompt, *answer]
    with torch.no_grad():
        taps = Driver(model, length=len(ids) + 1).prefill(ids).taps.clone()
    return taps, torch.tensor(ids), len(prompt)


def _loss(params: Params, config: DSparkConfig, example, head: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with position decay over blocks at every anchor of the answer; confidence on detached inputs."""
    taps, ids, first = example
    anchors = torch.arange(first, len(ids) - config.block_size)
    hidden = dspark_reference.block_hidden(params, config, taps, ids, anchors, embedding)
    offsets = anchors[:, None] + torch.arange(config.block_size)
    previous, labels = ids[offsets], ids[offsets + 1]
    logits = hidden @ head.T + dspark_reference.markov_bias(params, config, hidden, previous)
    weight = torch.exp(-torch.arange(config.block_size) / 4.0).expand_as(labels)
    loss = (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(weight) * weight).mean()
    right = (logits.argmax(-1) == labels).float()
    estimate = dspark_reference.confidence(params, config, hidden.detach(), previous)
    return loss + F.binary_cross_entropy_with_logits(estimate, right)
