"""Training data of drafters: answers are the target's own, pools that do not fit are refused, rows are repeatable."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest
import torch

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.train_draft_args import TrainDraftArgs
from sgling.training import ops
from sgling.training.draft.conversations import Conversations, PromptStream, read_file
from sgling.training.draft.pool import Pool, read_pool, supervised_summary, warn_if_given
from sgling.training.draft.regenerate import BatchedGenerator, EngineGenerator, Limits
from sgling.training.draft.rows import Sample
from sgling.training.draft.sources import PoolSource
from sgling.training.draft.target import Target, default_taps
from sgling.training.draft.text_format import TextFormat
from train.miniature import write_target

LIMITS = Limits(length=300, new_tokens=12, slots=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    text = TextFormat(str(write_target(tmp_path_factory.mktemp("target"))))
    return Target(text, "cpu", torch.float32, (-1, 0))


@pytest.fixture(scope="module")
def prompts(target):
    source = Conversations(target.text, None, seed=3, keep=2)
    return [prompt for prompt in (source.prompt(index) for index in range(12)) if len(prompt.ids) < 250][:7]


def generate(kind, target: Target, prompts, settings, limits: Limits = LIMITS, seed: int = 5) -> list[list[int]]:
    generator = kind(target, limits, settings, seed)
    try:
        return [done.ids for done in sorted(generator.answers(prompts), key=lambda done: done.index)]
    finally:
        generator.close()


@torch.no_grad()
def test_greedy_answers_are_the_targets_best_tokens(target, prompts):
    for prompt, ids in zip(prompts, generate(BatchedGenerator, target, prompts, (0.0,)), strict=True):
        assert ids[: len(prompt.ids)] == prompt.ids and len(ids) > len(prompt.ids)
        hidden = target.model.trunk(torch.tensor(ids), ops.make_layout([0], len(ids), "cpu"))
        best = (hidden @ target.model.head.T).argmax(-1)[len(prompt.ids) - 1 : -1]
        assert best.tolist() == ids[len(prompt.ids) :]


def test_answers_do_not_depend_on_slots_or_company(target, prompts):
    together = generate(BatchedGenerator, target, prompts, (0.0, 0.8))
    assert together == generate(BatchedGenerator, target, prompts, (0.0, 0.8), LIMITS._replace(slots=7))
    other = generate(BatchedGenerator, target, prompts, (0.0, 0.8), seed=6)
    assert [a == b for a, b in zip(together, other, strict=True)] == [True, False, True, False, True, False, True]


def test_the_engine_writes_the_same_answers(target, prompts):
    """Greedy and sampled: the noise of both is keyed by (seed, position, token)."""
    own = generate(BatchedGenerator, target, prompts, (0.0, 0.8))
    assert generate(EngineGenerator, target, prompts, (0.0, 0.8)) == own


def test_only_what_the_target_wrote_is_supervised(target, prompts):
    done = next(BatchedGenerator(target, LIMITS, (0.0,), 5).answers(prompts))
    sample = done.sample()
    assert sample.answer.sum() == len(done.ids) - done.prompt_length and not sample.answer[: done.prompt_length].any()
    assert sample.regenerated and sample.temperature == 0.0


def test_prompts_do_not_depend_on_workers(target):
    source = Conversations(target.text, None, seed=4, keep=2)
    alone, two = PromptStream(source, 0), PromptStream(source, 2)
    try:
        pairs = zip(alone.prompts(100, 70), two.prompts(100, 70), strict=True)
        assert all(a.ids == b.ids and np.array_equal(a.whole, b.whole) for a, b in pairs)
    finally:
        two.close()


def test_conversations_of_a_file(target, tmp_path):
    talks = [
        {"messages": [{"role": "user", "content": f"Question {i}"}, {"role": "assistant", "content": f"Answer {i}"}]}
        for i in range(6)
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, talks)))
    source = Conversations(target.text, str(path), seed=0, keep=2)
    prompt = source.prompt(1)
    decode = target.text.tokenizer.decode
    assert decode(prompt.ids, skip_special_tokens=False).endswith("<role>ASSISTANT</role>\n<think></think>")
    answer = [int(token) for token, marked in zip(prompt.whole, prompt.answer, strict=True) if marked]
    assert decode(answer, skip_special_tokens=False) == "\n<think></think>Answer 1<|role_end|>"
    kept = [decode(held.ids) for held in source.held_out(2)]
    assert "Question 4" in kept[0] and "Question 5" in kept[1]
    seen = {decode(source.prompt(index).ids) for index in range(20)}
    assert len(seen) == 4 and not any("Question 5" in text for text in seen)
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"text": 1}')
    with pytest.raises(ServerArgsError, match="line 2"):
        read_file(str(path))


def sample(size: int, supervised: int, regenerated: bool = True) -> Sample:
    return Sample(np.arange(size, dtype=np.int32), np.arange(size) >= size - supervised, regenerated, 0.0)


def test_pool_file_keeps_samples_and_refuses_what_does_not_fit(target, tmp_path):
    identity = target.text.identity()
    pool = Pool((sample(5, 2), sample(9, 4, regenerated=False)), identity)
    pool.write(tmp_path / "pool.safetensors")
    again = read_pool(tmp_path / "pool.safetensors", identity)
    for a, b in zip(pool.samples, again.samples, strict=True):
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.answer, b.answer) and a[2:] == b[2:]
    for name, value in (("tokenizer", "other"), ("template", "other"), ("vocab_size", 7)):
        with pytest.raises(ServerArgsError, match=f"{name}.*{value}"):
            read_pool(tmp_path / "pool.safetensors", identity._replace(**{name: value}))
    other = read_pool(tmp_path / "pool.safetensors", identity._replace(target="other weights"))
    assert not any(found.regenerated for found in other.samples)
    Pool((sample(7000, 2),), identity).write(tmp_path / "wide.safetensors")
    with pytest.raises(ServerArgsError, match="token 6999"):
        read_pool(tmp_path / "wide.safetensors", identity)
    (tmp_path / "broken").write_bytes(b"no pool")
    with pytest.raises(ServerArgsError, match="--pool"):
        read_pool(tmp_path / "broken", identity)


def test_samples_without_supervised_tokens(caplog):
    text = supervised_summary([sample(5, 2), sample(9, 4), sample(4, 0)])
    assert "2.0 on average, 0 to 4, 6 in all over 3 samples" in text and "1 samples have none" in text
    with pytest.raises(ServerArgsError, match="none of 2 samples"):
        supervised_summary([sample(5, 0), sample(9, 0)])
    with caplog.at_level(logging.WARNING):
        assert warn_if_given([sample(5, 2), sample(9, 2)]) == 0 and not caplog.text
        assert warn_if_given([sample(5, 1), sample(9, 3, regenerated=False)]) == 0.75
    assert "75.0 %" in caplog.text


def test_batches_of_a_pool_are_functions_of_seed_and_number(target):
    args = TrainDraftArgs(row=32, rows=2, given_share=0.5)
    pool = Pool(tuple(sample(8 + index % 5, 3, index % 2 == 0) for index in range(40)), target.text.identity())
    source, again = (PoolSource(args, pool, pad=0) for _ in range(2))
    assert torch.equal(source.batch(3).tokens, again.batch(3).tokens)
    other = PoolSource(dataclasses.replace(args, seed=1), pool, pad=0)
    assert not torch.equal(source.batch(3).tokens, other.batch(3).tokens)
    assert not torch.equal(source.batch(3).tokens, source.batch(4).tokens)


def test_target_files_are_checked(tmp_path):
    folder = write_target(tmp_path / "t")
    (folder / "chat_template.jinja").rename(folder / "elsewhere")
    with pytest.raises(ServerArgsError, match="no template"):
        TextFormat(str(folder))
    (folder / "elsewhere").rename(folder / "chat_template.jinja")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 6000}))
    with pytest.raises(ServerArgsError, match="6112 ids.*6000 rows"):
        TextFormat(str(folder))


def test_default_taps_of_the_embedded_model():
    assert default_taps(TextFormat("ling3-pico").config) == (1, 3, 5, 6)
