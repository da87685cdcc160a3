"""What the lossless suites run: models on disk, set-ups of the engine, plays of requests and drafters on them.

Everything takes its device from the :class:`Bed`, so that the tests of a GPU run on a CPU too (tiny model, graphs
replaced by the functions they recorded, see test/spec/test_lossless_suite.py).
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer

from model.published import FLASH
from model.tiny_drafter import MLA, drafter_config
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.managers import scheduler
from sgling.srt.model_executor import model_runner
from spec.fake_graphs import with_graphs
from spec.harness import Harness, Oracle, random_drafter, random_prompt, request

LAYERS = {"slice": 12, "deep": FLASH["num_hidden_layers"]}  # of models with random weights
RANK_SHAPE = {  # what one of four ranks holds of a layer of the published model, with 64 experts
    **FLASH,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 64,
    "moe_intermediate_size": 192,
    "moe_shared_expert_intermediate_size": 192,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
MODELS = ("pico", "slice")  # the embedded model with its trained NEXTN layer; random weights in the published shape
WIDEST = 17
NEW_TOKENS = 32
LONGEST = 900  # tokens of the answers that an oracle of wide windows knows
BUCKETS = [1, 4]
FEATURES = (  # of request i
    {},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 50},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 0.8, "logit_bias": {7: 3.0, 11: -100.0}, "min_new_tokens": 12},
)
QUESTIONS = (
    "Please write a function that joins a list of words with a comma.",
    "67*8 = ?",
    "What is the capital of France, and how many people live there?",
    "Write a function `largest` that returns the largest number of a list, with type hints and one example.",
)
CHAT = (
    "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>{}<|role_end|>"
    "<role>ASSISTANT</role>\n<think></think>"
)


class Setup(NamedTuple):
    """How an engine is built.

    Attributes:
        algorithm: "NEXTN", "DSPARK" or "none".
        width: rows per request in a verify (none: 1).
        rollback, metadata, relay: server arguments of nearly those names.
        graphs: whether decode steps are captured.
        kernels: "cuda" or "triton", what serves where both exist.
        pdl: whether nodes may start before their predecessor ends.
    """

    algorithm: str = "NEXTN"
    width: int = 4
    rollback: str = "replay"
    metadata: str = "in_graph"
    relay: str = "merged"
    graphs: bool = True
    kernels: str = "cuda"
    pdl: bool = True


class Play(NamedTuple):
    """What runs on it.

    Attributes:
        drafter: "own", "random", "wrong" (never right), or "oracle" (errors planted, every accept length in turn).
        batch: requests that run together: 1 (one after another), 2 (in a bucket of 4) or 4.
    """

    drafter: str = "own"
    batch: int = 1


PLAIN = Setup("none", 1, graphs=False)


class Bed:
    """One model on one device, with its right answers; weights are loaded once per kind of drafter.

    Attributes:
        name: "pico", one of ``LAYERS``, or "tiny" for a model directory of a test.
        config: contents of the model's config.json.
        vocab: ids below it may be drafted.
        drafter: directory of its random DSPARK drafter.
    """

    def __init__(self, name: str, directory: Path, device: str, model_path: Path | None = None):
        self.name, self.device = name, device
        self._path = model_path or _model_path(name, directory)
        self.config = json.loads((self._path / "config.json").read_text(encoding="utf-8"))
        self.vocab = self.config["vocab_size"]
        self.drafter = _write_drafter(self.config, directory / f"{name}-dspark")
        self._dummy = name in LAYERS
        self._prompts = _prompts(self._path, self.vocab)
        self._weights: dict[tuple, object] = {}
        self._truth: dict[tuple[str, int], dict[str, list[int]]] = {}

    def requests(self, new_tokens: int = NEW_TOKENS, count: int = len(FEATURES)) -> list:
        """Greedy, seeded, greedy with penalties, seeded with bias and a minimum length; prompts differ in length."""
        return [
            request(f"r{i}", prompt, max_new_tokens=new_tokens, **FEATURES[i])
            for i, prompt in enumerate(self._prompts[:count])
        ]

    def truth(self, kernels: str, new_tokens: int = NEW_TOKENS) -> dict[str, list[int]]:
        """Plain decoding, one request at a time, no graph, with these kernels; long answers through plain graphs."""
        length = NEW_TOKENS if new_tokens <= NEW_TOKENS else LONGEST
        assert new_tokens <= length
        if (kernels, length) not in self._truth:
            setup = PLAIN._replace(kernels=kernels, graphs=length > NEW_TOKENS)
            self._truth[kernels, length] = self._answers(self.harness(setup), 1, length)
        return {rid: ids[:new_tokens] for rid, ids in self._truth[kernels, length].items()}

    def run(
        self, setup: Setup, play: Play, new_tokens: int = NEW_TOKENS, use_drafts=Harness.use_drafter, **kwargs
    ) -> tuple[dict[str, list[int]], Counter]:
        """(ids by request, how often each accept length occurred) of one engine.

        ``use_drafts`` (harness, drafts) replaces a drafter's drafts; ``kwargs`` are further server arguments.
        """
        if play.drafter in ("wrong", "oracle"):
            self.truth(setup.kernels, new_tokens)  # before the engine: building another one sets the kernel switches
        harness = self.harness(setup, **kwargs)
        accepted = _count_accept_lengths(harness)
        if setup.algorithm != "none":
            use_drafts(harness, self._drafts(harness, setup, play.drafter, new_tokens))
        return self._answers(harness, play.batch, new_tokens), accepted

    def _answers(self, harness: Harness, batch: int, new_tokens: int) -> dict[str, list[int]]:
        waiting = self.requests(new_tokens)
        while waiting:
            harness.run(*waiting[:batch])
            waiting = waiting[batch:]
        return {rid: outcome.ids for rid, outcome in harness.outcomes.items()}

    def _drafts(self, harness: Harness, setup: Setup, drafter: str, new_tokens: int):
        if drafter == "own":
            return None
        if drafter == "random":
            return random_drafter(self.vocab)
        truth = self.truth(setup.kernels, new_tokens)
        known = {item.rid: (len(item.input_ids), truth[item.rid]) for item in self.requests()}
        return Oracle(harness, known, self.vocab, always_wrong=drafter == "wrong")

    def harness(self, setup: Setup, **kwargs) -> Harness:
        """A scheduler in this thread; ``kwargs`` are further server arguments."""
        gc.unfreeze()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLING_DISABLE_CUDA_KERNELS", str(int(setup.kernels == "triton")))
            patch.setenv("SGLING_DISABLE_PDL", str(int(not setup.pdl)))
            patch.setattr(scheduler, "warm_up_prefill", lambda *args: 0.0)  # each of many engines would pay for it
            for loader in ("get_model", "get_drafter"):
                patch.setattr(model_runner, loader, self._loaded_once(loader, setup))
            harness = Harness(self._path, **{**self._arguments(setup), **kwargs})
        if self.device == "cpu" and setup.graphs:
            return with_graphs(harness, BUCKETS, setup.relay == "merged")
        return harness

    def _arguments(self, setup: Setup) -> dict:
        arguments = {
            "device": self.device,
            "load_format": "dummy" if self._dummy else "auto",
            "speculative_algorithm": setup.algorithm,
            "linear_rollback": setup.rollback,
            "cuda_graph_metadata": setup.metadata,
            "cuda_graph_relay": setup.relay,
            "disable_cuda_graph": not setup.graphs,
            "enable_deterministic_inference": self.device == "cpu",
            "cuda_graph_bs_decode": BUCKETS,
            "max_running_requests": BUCKETS[-1],
            "context_length": 1536,
            "max_total_tokens": 8192,
        }
        if setup.algorithm == "NEXTN":
            ring = 1 << (2 * setup.width - 1).bit_length()
            arguments["spec"] = {"num_steps": setup.width - 1, "width": setup.width, "ring_length": max(16, ring)}
        if setup.algorithm == "DSPARK":
            arguments["speculative_draft_model_path"] = str(self.drafter)
            arguments["speculative_draft_load_format"] = "dummy"
            arguments["speculative_dspark_block_size"] = max(1, setup.width - 1)
        return arguments

    def _loaded_once(self, loader: str, setup: Setup):
        """The loader, with a memory: weights are read-only and depend on what drafts and on the kernels only.

        A target also depends on the layers its drafter taps, the loader's last argument.
        """
        load = getattr(model_runner, loader)

        def remembered(*args):
            taps = args[-1] if loader == "get_model" else ()
            key = (loader, setup.algorithm, setup.kernels, taps)
            if loader == "get_drafter" or key not in self._weights:
                self._weights[key] = load(*args)
            return self._weights[key]

        return remembered


def _count_accept_lengths(harness: Harness) -> Counter:
    seen: Counter = Counter()
    count = harness.core.results._count

    def counted(req, accepted, width) -> None:
        seen[accepted] += 1
        count(req, accepted, width)

    harness.core.results._count = counted
    return seen


def _model_path(name: str, directory: Path) -> Path:
    """The embedded model's directory, or one with config.json only (dummy weights)."""
    if name == "pico":
        return resolve_model_path("ling3-pico")
    path = directory / name
    path.mkdir()
    limits = {
        key: FLASH[key][-LAYERS[name] :] for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    }
    config = {**RANK_SHAPE, "num_hidden_layers": LAYERS[name], **limits}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _write_drafter(target: dict, path: Path) -> Path:
    """config.json of a random DSPARK drafter for a target: two layers, grouped-query or (published shape) latent."""
    latent = target["kv_lora_rank"] == 512
    shape = MLA | {key: target[key] for key in MLA} if latent else {"num_key_value_heads": 2}
    last = target["num_hidden_layers"] - 2
    config = drafter_config(
        vocab_size=target["vocab_size"],
        hidden_size=target["hidden_size"],
        num_attention_heads=target["num_attention_heads"],
        head_dim=target["head_dim"],
        intermediate_size=target["intermediate_size"],
        num_target_layers=target["num_hidden_layers"],
        max_position_embeddings=target["max_position_embeddings"],
        block_size=WIDEST - 1,
        target_layer_ids=[0, last // 2, last],
        mask_token_id=target["vocab_size"] - 1,
        markov_rank=64 if latent else 32,
        **shape,
    )
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _prompts(path: Path, vocab: int) -> list[list[int]]:
    """Chats for a model with a tokenizer, random ids for the others; lengths differ."""
    if not (path / "tokenizer.json").exists():
        return [random_prompt(7 + 30 * i, i, vocab) for i in range(len(FEATURES))]
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [tokenizer.encode(CHAT.format(question), add_special_tokens=False).ids for question in QUESTIONS]
