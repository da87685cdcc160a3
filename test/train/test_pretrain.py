"""The training forward, its losses, data blocks, and whole miniature runs on the CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.train_args import PretrainOptions
from sgling.training import ops
from sgling.training.data import BlockStream, Marks, assistant_mask, load_tokenizer, make_block
from sgling.training.decode import Decoder
from sgling.training.evaluate import accept_run, scenario_entry
from sgling.training.export import public_tensors, read_checkpoint, round_to_disk, write_checkpoint
from sgling.training.losses import Rows, chain_hiddens, joint_losses, rows_layout, targets
from sgling.training.model import Pico
from sgling.training.optimizer import orthogonalize
from sgling.training.pretrain import train
from train.miniature import write_miniature


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path) -> ModelConfig:
    return ModelConfig.from_dir(write_miniature(tmp_path))


@pytest.fixture
def model(config) -> Pico:
    torch.manual_seed(0)
    model = Pico(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    for moe in model.moe_layers():
        moe.expert_bias.normal_(0, 0.1)
    return model


def test_recurrence_is_the_delta_rule():
    """Against the textbook formula for one head: S <- (I - beta k k^T) Diag(a) S + beta k v^T."""
    torch.manual_seed(1)
    q, k, v, g = (torch.randn(6, 1, 4) for _ in range(4))
    g, beta = -g.abs(), torch.rand(6, 1)
    out = ops.kda_recurrence(q, k, v, g, beta, torch.tensor([0, 1, 2, 0, 1, 2]))
    state = torch.zeros(4, 4)
    for t in range(6):
        if t == 3:
            state = torch.zeros(4, 4)
        unit = ops.l2_normalize(k[t, 0])
        state = (torch.eye(4) - beta[t] * torch.outer(unit, unit)) @ (g[t, 0].exp()[:, None] * state)
        state = state + beta[t] * torch.outer(unit, v[t, 0])
        torch.testing.assert_close(out[t, 0], state.T @ ops.l2_normalize(q[t, 0]) * 0.5)


@torch.no_grad()
def test_documents_do_not_see_each_other(model):
    tokens = torch.arange(40) * 7 % 6000
    both = model.trunk(tokens, ops.make_layout([0, 15], 40, "cpu"))
    alone = model.trunk(tokens[15:], ops.make_layout([0], 25, "cpu"))
    torch.testing.assert_close(both[15:], alone)


@torch.no_grad()
def test_decoder_follows_the_trunk(model):
    prompts = [[5, 6, 7, 8, 9], [100, 200]]
    answers = Decoder(model, prompts, 24, (6082, 6081)).run()
    for prompt, answer in zip(prompts, answers, strict=True):
        text = prompt + answer
        hidden = model.trunk(torch.tensor(text), ops.make_layout([0], len(text), "cpu"))
        assert (hidden @ model.head.T).argmax(-1)[len(prompt) - 1 : -1].tolist() == answer


def test_labels_stay_inside_documents():
    tokens, layout = torch.arange(10, 20), ops.make_layout([0, 4], 10, "cpu")
    labels, valid = targets(tokens, layout, 2)
    assert labels[valid].tolist() == [12, 13, 16, 17, 18, 19]
    assert valid.tolist() == [True, True, False, False, True, True, True, True, False, False]


@torch.no_grad()
def test_nextn_sees_the_next_token_and_not_the_one_after(model):
    """Position p may depend on token p + 1 (its input) and must not depend on token p + 2 (its label)."""
    tokens = torch.arange(1, 21) * 11
    layout = ops.make_layout([0], 20, "cpu")
    hidden = model.trunk(tokens, layout)
    drafted = model.draft(tokens, hidden, layout)
    changed = tokens.clone()
    changed[10] += 1
    moved = (model.draft(changed, model.trunk(changed, layout), layout) - drafted).abs().amax(-1)
    assert moved[:9].max() == 0 and moved[9] > 1e-4


@torch.no_grad()
def test_chain_step_one_is_the_plain_draft_and_rows_are_independent(model):
    tokens = torch.randint(0, 6000, (2, 16), generator=torch.Generator().manual_seed(3))
    rows = Rows(
        tokens, torch.ones(2, 16, dtype=torch.bool), torch.tensor([[0] * 16, [1] * 16]), torch.arange(16).expand(2, 16)
    )
    hidden = model.trunk(tokens.flatten(), rows_layout(rows)).unflatten(0, (2, 16))
    chain = chain_hiddens(model, rows, hidden, 3)
    plain = model.draft(tokens.flatten(), hidden.flatten(0, 1), rows_layout(rows)).unflatten(0, (2, 16))
    torch.testing.assert_close(chain[0][:, :-1], plain[:, :-1])
    changed = tokens.clone()
    changed[0, 9] += 1
    other = chain_hiddens(model, rows._replace(tokens=changed), hidden, 3)
    assert torch.equal(other[2][1], chain[2][1])
    assert torch.equal(other[2][0, :6], chain[2][0, :6]) and not torch.equal(other[2][0, 6], chain[2][0, 6])


def test_accept_run_counts_rounds():
    hits = torch.zeros(3, 20, dtype=torch.bool)
    hits[:, 4] = True
    hits[0, 8] = True
    assert accept_run(hits, 5, 12, width=4) == [4, 2, 1]


def test_blocks_are_deterministic_and_marked():
    tokenizer = load_tokenizer()
    first, again = (make_block(tokenizer, "t", 3, 2048) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert 0.2 < first.answer.mean() < 0.8 and first.starts[0] == 0
    stream = BlockStream("t", 2048, workers=2)
    blocks = [stream.next() for _ in range(4)]
    stream.close()
    assert np.array_equal(blocks[3].tokens, first.tokens)


def test_assistant_mask_covers_the_answer_and_its_end():
    tokenizer = load_tokenizer()
    text = "<role>HUMAN</role>ASSISTANT hi<|role_end|><role>ASSISTANT</role>\n<think></think>yes<|role_end|>"
    text += "<role>HUMAN</role>b<|role_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    mask = assistant_mask(ids, Marks.of(tokenizer))
    marked = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False)
    assert marked == "\n<think></think>yes<|role_end|>"


def test_checkpoint_round_trip(model, config, tmp_path):
    round_to_disk(model)
    write_checkpoint(model, tmp_path / "out")
    other = Pico(config)
    read_checkpoint(other, tmp_path / "out")
    for (name, a), (_, b) in zip(public_tensors(model), public_tensors(other), strict=True):
        assert torch.equal(a, b), name


def test_orthogonalize_flattens_singular_values():
    for shape in ((3, 8, 16), (1, 32, 8)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(*shape)))
        assert values.min() > 0.5 and values.max() < 1.3


def miniature(tmp_path, name: str, **changes) -> PretrainOptions:
    base = {"steps": 5, "nextn_steps": 1, "tokens": 128, "row": 64, "chain": 3, "log_every": 1}
    return PretrainOptions(output=tmp_path / name, config=write_miniature(tmp_path), **(base | changes))


def test_loss_falls_and_trunk_is_frozen_in_the_nextn_stage(tmp_path):
    run = train(miniature(tmp_path, "a", steps=20, nextn_steps=0, tokens=128, rate=8.0))
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    early, late = (np.mean([line["main"] for line in part]) for part in (lines[:3], lines[11:15]))
    assert late < early - 0.15
    trunk = {name: value.clone() for name, value in public_tensors(run.model)}
    more = train(miniature(tmp_path, "b", steps=0, nextn_steps=1, init=tmp_path / "a" / "model"))
    for name, value in public_tensors(more.model):
        same = torch.equal(value, trunk[name])
        assert same or name.startswith("model.layers.2."), name
    assert not torch.equal(
        dict(public_tensors(more.model))["model.layers.2.eh_proj.weight"], trunk["model.layers.2.eh_proj.weight"]
    )


def test_second_run_from_the_same_seed_gives_the_same_weights(tmp_path):
    first, second = (train(miniature(tmp_path, name, steps=3, nextn_steps=2)) for name in ("first", "second"))
    for (name, a), (_, b) in zip(public_tensors(first.model), public_tensors(second.model), strict=True):
        assert torch.equal(a, b), name
    other = train(miniature(tmp_path, "other", steps=3, nextn_steps=2, seed="other"))
    assert not torch.equal(first.model.head, other.model.head)


def test_score_card_of_the_training_forward(model):
    entry = scenario_entry(model, load_tokenizer(), "small_talk", count=2, length=80)
    assert entry["held_out"]["answers"] == 2
    assert entry["held_out"]["accept_length"] == entry["accept_length_by_width"]["4"] >= 1
    assert list(entry["accept_length_by_width"]) == ["2", "4", "6", "8"] and len(entry["acceptance_by_position"]) == 7


def test_resumed_run_gives_the_same_weights(tmp_path):
    straight = train(miniature(tmp_path, "straight", nextn_steps=0))
    options = miniature(tmp_path, "cut", nextn_steps=0)
    from sgling.training.pretrain import Run

    run, step = Run(options), Run.joint_step

    def stop_after_three(self, progress, optimizer, index):
        if index == 3:
            self.save("joint", 3, 0.0, optimizer)
            raise KeyboardInterrupt
        return step(self, progress, optimizer, index)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "joint_step", stop_after_three)
        run.joint()
    resumed = train(miniature(tmp_path, "rest", nextn_steps=0, resume=tmp_path / "cut" / "checkpoint.pt"))
    for (name, a), (_, b) in zip(public_tensors(straight.model), public_tensors(resumed.model), strict=True):
        assert torch.equal(a, b), name


def test_gradient_reaches_every_parameter(model):
    model.train()
    tokens = torch.randint(0, 6000, (64,), generator=torch.Generator().manual_seed(1))
    losses = joint_losses(model, tokens, torch.ones(64, dtype=torch.bool), ops.make_layout([0, 30], 64, "cpu"), 0.2)
    (losses.main + losses.nextn).backward()
    assert not [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().sum() > 0
    ]
