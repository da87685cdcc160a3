"""What is trained: a DSpark drafter, or the target's own NEXTN layer. One interface for the loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import save_file

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.train_draft_args import TrainDraftArgs

from ..export import public_tensors, write_checkpoint
from ..losses import Rows, chain_losses
from . import losses
from .drafter import Drafter
from .rows import draw_anchors
from .shape import first_tensors, read_shape
from .simulate import dspark_hits, nextn_hits
from .target import Features, Target
from .text_format import TextFormat

CHAIN_DECAY = 0.85
Reduce = Callable[[torch.Tensor], torch.Tensor]


class StepResult(NamedTuple):
    """Loss to minimise (this rank's share of the global mean), and figures to log."""

    loss: torch.Tensor
    figures: dict[str, torch.Tensor]


class Task(Protocol):
    """A drafter under training. ``width``: rows of a verify it drafts for."""

    width: int
    parameters: dict[str, torch.nn.Parameter]

    def loss(self, features: Features, step: int, progress: float, reduce: Reduce) -> StepResult:
        """Of one step; ``reduce`` adds divisors up over trainer ranks."""

    def after_step(self, factor: float) -> None:
        """What follows the optimizer."""

    def hits(self, features: Features, span: tuple[int, int]) -> torch.Tensor:
        """See :class:`simulate.Drafting`."""

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that is trained, detached copies on the CPU."""

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Put it back."""

    def export(self, folder: Path) -> Path:
        """Write the drafter as the server loads it; returns the folder."""


def _figures_by_position(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}_{k}": value for k, value in enumerate(values, 1)}


class DSparkTask:
    """A DSpark drafter on a frozen target."""

    def __init__(self, args: TrainDraftArgs, target: Target, raw: dict[str, Any], config: Any) -> None:
        self.args, self.raw, self.config = args, raw, config
        model = target.model
        self.drafter = Drafter(config, first_tensors(args, config), model.embedding, model.head)
        self.parameters = self.drafter.params
        self.width = config.block_size + 1

    def loss(self, features: Features, step: int, progress: float, reduce: Reduce) -> StepResult:
        """CE, L1, confidence and (later) expected length over blocks at this step's anchors."""
        args = self.args
        decay = args.decay or self.config.block_size / 2
        anchors = draw_anchors(features.rows, args.anchors, args.seed, step)
        sums = losses.block_sums(self.drafter, features, anchors, decay)
        divisors = reduce(torch.stack((sums.weight, sums.blocks)).detach())
        length = args.length if progress >= args.length_from else 0.0
        total = losses.total_loss(sums, losses.Weights(args.ce, args.l1, args.confidence, length), divisors)
        figures = {name: getattr(sums, name) / sums.weight.clamp_min(1) for name in ("ce", "l1", "confidence")}
        figures |= {"expected_length": 1 + sums.length / sums.blocks.clamp_min(1), "blocks": sums.blocks}
        figures |= _figures_by_position("overlap", sums.overlap) | _figures_by_position("hit", sums.hits)
        return StepResult(total, figures)

    def after_step(self, factor: float) -> None:
        """Nothing."""

    def hits(self, features: Features, span: tuple[int, int]) -> torch.Tensor:
        """See :class:`Task`."""
        return dspark_hits(self.drafter, features, span)

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`Task`."""
        return {name: value.detach().cpu().clone() for name, value in self.parameters.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See :class:`Task`."""
        for name, value in self.parameters.items():
            value.copy_(state[name])

    def export(self, folder: Path) -> Path:
        """config.json and BF16 weights under the public names, without the target's embedding and head."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in self.state().items()}
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.raw, indent=1) + "\n", encoding="utf-8")
        for name in ("model.safetensors", "config.json"):
            (folder / name).chmod(0o644)
        return folder


class NextnTask:
    """The target's NEXTN layer, on the frozen trunk, with the self-fed chain loss."""

    def __init__(self, args: TrainDraftArgs, target: Target) -> None:
        if not target.text.config.num_nextn_predict_layers:
            raise ServerArgsError(f"{target.text.directory}: the target has no NEXTN layer")
        self.args, self.target, self.layer = args, target, target.model.nextn
        self.layer.train().requires_grad_(True)
        self.parameters = dict(self.layer.named_parameters())
        self.width = args.chain + 1

    def loss(self, features: Features, step: int, progress: float, reduce: Reduce) -> StepResult:
        """Mean over the chain's steps of the cross entropy to the trunk's distribution, later steps weighing less."""
        found, hits = chain_losses(self.target.model, Rows(*features.rows), features.hidden, self.args.chain)
        ranks = reduce(torch.ones(2, device=features.hidden.device))[0]
        total = sum(CHAIN_DECAY**index * loss for index, loss in enumerate(found)) / ranks
        figures = {f"loss_{k}": value for k, value in enumerate(found, 1)}
        return StepResult(total, figures | {f"hit_{k}": value for k, value in enumerate(hits, 1)})

    def after_step(self, factor: float) -> None:
        """The selection bias of the experts follows their load."""
        self.layer.layer.ffn.update_bias(1e-3 * min(1.0, factor))

    def hits(self, features: Features, span: tuple[int, int]) -> torch.Tensor:
        """See :class:`Task`."""
        self.layer.eval()
        found = nextn_hits(self.target.model, features, self.args.chain)
        self.layer.train()
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`Task`."""
        return {name: value.detach().cpu().clone() for name, value in self.layer.state_dict().items()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """See :class:`Task`."""
        self.layer.load_state_dict(state)

    def export(self, folder: Path) -> Path:
        """The whole target with the new layer: weights, tokenizer, template, config."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.target.text.directory.iterdir():
            if file.suffix in (".json", ".jinja") and "index" not in file.name and file.name != "acceptance.json":
                shutil.copy(file, folder / file.name)
        write_checkpoint(self.target.model, folder)
        return folder

    def trunk(self) -> dict[str, torch.Tensor]:
        """Public tensors that must not change."""
        prefix = f"model.layers.{self.target.text.config.nextn_layer_id}."
        return {name: value for name, value in public_tensors(self.target.model) if not name.startswith(prefix)}


def make_task(kind: str, args: TrainDraftArgs, text: TextFormat) -> tuple[tuple[int, ...], Callable[[Target], Task]]:
    """(layers to tap, what makes the task on a loaded target). Shapes are checked before anything is loaded."""
    if kind == "nextn":
        return (), lambda target: NextnTask(args, target)
    raw, config = read_shape(args, text)
    return config.target_layer_ids, lambda target: DSparkTask(args, target, raw, config)
