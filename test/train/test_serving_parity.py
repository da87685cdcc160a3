"""Training forward and serving path compute the same function of the embedded weights: trunk, NEXTN, draft chain."""

from __future__ import annotations

import pytest
import torch

from model.driver import Driver, load
from sgling.srt.core.forward_batch import ForwardMode
from sgling.training import ops
from sgling.training.data import load_tokenizer
from sgling.training.export import read_checkpoint
from sgling.training.generator import mix
from sgling.training.losses import Rows, chain_hiddens
from sgling.training.model import Pico

LENGTH, START = 120, 90


@pytest.fixture(scope="module")
def pair():
    """(text ids, serving model, training model)."""
    served = load(mix.PICO_DIR, with_nextn=True)
    trained = Pico(served.target.config).eval()
    read_checkpoint(trained, mix.PICO_DIR)
    text = mix.render(mix.draw("coding", "parity", "train")) + mix.render(mix.draw("zh_chat", "parity", "train"))
    return load_tokenizer().encode(text, add_special_tokens=False).ids[:LENGTH], served, trained


@torch.no_grad()
def test_logits_nextn_and_chain_agree(pair):
    ids, served, trained = pair
    tokens, layout = torch.tensor(ids), ops.make_layout([0], LENGTH, "cpu")
    driver = Driver(served)
    hidden = driver.prefill(ids).hidden
    ours = trained.trunk(tokens, layout)
    torch.testing.assert_close(served.target.logits(hidden), ours @ trained.head.T, atol=2e-4, rtol=0)

    rows = Rows(
        tokens[None],
        torch.ones(1, LENGTH, dtype=torch.bool),
        torch.zeros(1, LENGTH, dtype=torch.int64),
        torch.arange(LENGTH)[None],
    )
    chain = chain_hiddens(trained, rows, ours[None], 4)
    extend = driver.batch(ForwardMode.DRAFT_EXTEND, ids[1 : START + 2], start=0)
    drafted = served.nextn.forward(extend, hidden[: START + 1], driver.pools)
    torch.testing.assert_close(drafted, trained.draft(tokens, ours, layout)[: START + 1], atol=2e-4, rtol=0)
    carried = drafted[-1:]
    for step in range(2, 5):
        batch = driver.batch(ForwardMode.DRAFT_DECODE, [ids[START + step]], start=START + step - 1)
        carried = served.nextn.forward(batch, carried, driver.pools)
        torch.testing.assert_close(carried[0], chain[step - 1][0, START], atol=2e-4, rtol=0)
