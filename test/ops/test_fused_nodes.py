"""Small nodes of a round that were folded into one kernel each: equal to their references, bit for bit where copied."""

from __future__ import annotations

import pytest
import torch

from ops.kda_case import same_bits
from sgling_kernel.embedding import kernel as embedding_kernel
from sgling_kernel.embedding import reference as embedding_reference
from sgling_kernel.logits import Draws
from sgling_kernel.logits import kernel as logits_kernel
from sgling_kernel.logits import reference as logits_reference
from sgling_kernel.noise import kernel as noise_kernel
from sgling_kernel.noise.reference import gumbel_noise, seed_key, uniform_noise
from sgling_kernel.relay import kernel as relay_kernel
from sgling_kernel.relay import reference as relay_reference
from sgling_kernel.sampling import SingleShard
from sgling_kernel.verdict import SIMULATION_SEED, Sinks, Verdict, settlement, verdict_greedy
from sgling_kernel.verdict import kernel as verdict_kernel

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _device():
    """Every tensor of a test lies on the device under test."""
    torch.manual_seed(5)
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device("cpu")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = 2e-5 if actual.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)


def norm_of(dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    return torch.randn(dim).to(dtype), 1e-6


@dtypes
def test_embedding_and_norm(dtype):
    table, norm, ids = torch.randn(40, 96).to(dtype), norm_of(96, dtype), torch.randint(0, 40, (5, 3))[:, 1]
    got, want = (m.embed_norm(ids, table, norm) for m in (embedding_kernel, embedding_reference))
    assert same_bits(got[0], want[0])
    close(got[1], want[1])


@dtypes
def test_embedding_and_hidden_side_by_side(dtype):
    table, ids = torch.randn(40, 96).to(dtype), torch.randint(0, 40, (5, 3))[:, 1]
    hidden, rows = torch.randn(9, 96).to(dtype), torch.tensor([8, 0, 3, 3, 1])
    norms = norm_of(96, dtype), norm_of(96, dtype)
    for picked in (rows, None):
        source = hidden if picked is not None else hidden[:5]
        args = (ids, table, norms[0], source, norms[1], picked)
        close(embedding_kernel.embed_pair(*args), embedding_reference.embed_pair(*args))


def test_best_token_lands_in_a_strided_column_and_obeys_the_tie_rule():
    scores = torch.randn(4, 5000)
    scores[0, [7, 3000]] = 9.0
    scores[1] = -torch.inf
    scores[2, 4999] = torch.inf
    out, want = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int64)
    logits_kernel.best_token(scores, 100, out[:, 1])
    logits_reference.best_token(scores, 100, want[:, 1])
    assert torch.equal(out, want) and want[:3, 1].tolist() == [107, 100, 5099]


@dtypes
def test_relay_of_several_buffers_at_once(dtype):
    ids, hidden, rows = torch.randint(0, 99, (6,)), torch.randn(6, 2000).to(dtype), torch.tensor([4, 0, 2])
    got, want = (m.gather_relay((ids, hidden), rows) for m in (relay_kernel, relay_reference))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    results = []
    for module in (relay_kernel, relay_reference):
        buffers = ids.clone(), hidden.clone()
        module.scatter_relay(buffers, rows, (torch.tensor([1, 2, 3]), hidden[3:].float()))
        results.append(buffers)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@dtypes
@pytest.mark.parametrize("width", [1, 4])
def test_last_accepted_rows_of_several_tensors(dtype, width):
    accept_lens = torch.tensor([0, 1, width])
    fused = torch.randn(3 * width, 90).to(dtype)
    sources = (fused[:, 7:50], torch.randn(3 * width, 2, 600).to(dtype), torch.arange(3 * width))
    got, want = (m.take_accepted(sources, accept_lens, width) for m in (relay_kernel, relay_reference))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert want[2].tolist() == [0, width, 3 * width - 1]


@pytest.mark.parametrize("width", [1, 2, 6])
def test_window_candidates(width):
    tokens, rows = torch.randint(0, 99, (5,)), torch.tensor([3, 0, 1])
    drafts = torch.randint(0, 99, (3, 8))[:, : width - 1]
    got, want = (m.window_candidates(tokens, rows, drafts) for m in (relay_kernel, relay_reference))
    assert torch.equal(got, want) and got.shape == (3, width)


@pytest.mark.parametrize("width", [1, 2, 6, 17])
def test_greedy_verdict_in_two_nodes(width):
    rows = torch.tensor([2, 0, 1, 3])
    logits = torch.randn(4 * width, 5000)
    logits[0, [1, 4000]] = 50.0
    ids = logits_reference.argmax_lowest(logits)[1].view(4, width) + 7
    candidates = torch.cat((torch.zeros(4, 1, dtype=torch.int64), ids[:, :-1]), dim=-1)
    if width > 2:
        candidates[2, 2] += 1
    want = verdict_greedy(logits.cpu(), candidates.cpu(), SingleShard(), 7, rows.cpu())
    got = Verdict(*verdict_kernel.verdict_greedy(logits, candidates, 7, rows))
    assert [t.tolist() for t in got] == [t.tolist() for t in want]
    assert got.accept_lens.tolist() == [width, 0, min(width, 2), width]
    unpadded = verdict_kernel.verdict_greedy(logits, candidates, 7, None)
    assert unpadded[1].tolist()[1] == width


def sinks_of(bs: int, width: int, dtype: torch.dtype, full: bool) -> Sinks:
    """Fresh sinks of other strides than what they get; the smaller kind is what plain decoding has."""
    lens, tokens = torch.arange(5) * 100, torch.zeros(5, dtype=torch.int64)
    if not full:
        return Sinks(lens, tokens)
    wide = torch.zeros(bs, width + 3, dtype=torch.int64)
    flat = torch.zeros(2, bs, dtype=torch.int64)
    source = torch.randn(bs * width, 1500, generator=torch.Generator(DEVICE).manual_seed(1)).to(dtype)
    packed = torch.zeros(bs + 1, width + 4, dtype=torch.int64)[:bs, : width + 1]
    return Sinks(lens, tokens, wide[:, :width], flat[0], flat[1], (source, torch.zeros_like(source)), packed)


@dtypes
@pytest.mark.parametrize("simulated", [None, 1.0, 2.45, 9.5])
@pytest.mark.parametrize(("width", "full"), [(1, False), (1, True), (4, True), (6, True)])
def test_a_verdict_reaches_every_sink(dtype, simulated, width, full):
    rows, seq_lens = torch.tensor([4, 0, 1]), torch.tensor([31, 0, 2])
    verdict = Verdict(torch.randint(0, 99, (3, width)), torch.tensor([1, 0, width]), torch.tensor([5, 6, 7]))
    mine, theirs = (sinks_of(3, width, dtype, full) for _ in range(2))
    drawn = None if simulated is None else (simulated, seed_key(SIMULATION_SEED))
    got = verdict_kernel.settle(verdict, rows, seq_lens, mine, drawn)
    want = settlement.settle(verdict, rows, seq_lens, theirs, simulated)
    assert [t.tolist() for t in got] == [t.tolist() for t in want]
    for a, b in zip([*mine[:5], mine.packed], [*theirs[:5], theirs.packed], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    if full:
        assert torch.equal(mine.features[1], mine.features[0]) and torch.equal(theirs.features[1], mine.features[0])


def test_the_fused_draw_is_the_noise_of_the_reference():
    width, seq_lens = 8, torch.cat((torch.arange(300), torch.tensor([2**31, 2**40 + 7])))
    count = len(seq_lens)
    verdict = Verdict(torch.zeros(count, width, dtype=torch.int64), torch.ones(count, dtype=torch.int64), seq_lens)
    sinks = Sinks(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    draws = uniform_noise(torch.full_like(seq_lens, SIMULATION_SEED), seq_lens, 0, 1)[:, 0]
    got = verdict_kernel.settle(verdict, torch.arange(count), seq_lens, sinks, (3.45, seed_key(SIMULATION_SEED)))
    assert torch.equal(got.accept_lens, 3 + (draws < 3.45 - 3).long())


def test_noise_in_one_node():
    seeds, positions = torch.tensor([3, -(2**50), 2**40]), torch.tensor([0, 7, 2**33])
    for start in (0, 1000):
        args = seeds, positions, start, 3000
        assert torch.equal(noise_kernel.noise(*args, is_gumbel=False), uniform_noise(*args))
        torch.testing.assert_close(noise_kernel.noise(*args, is_gumbel=True), gumbel_noise(*args), rtol=1e-5, atol=1e-6)


def test_a_sampled_guess_adds_the_noise_in_the_same_nodes():
    tables = torch.tensor([0.0, 0.7, 1.3]), torch.tensor([9, 8, 7])
    draws = Draws(*tables, torch.tensor([2, 0, 1]), torch.arange(3), 5000)
    chosen, scores = torch.arange(0, 5000, 3), torch.randn(3, 5000)
    for ids, logits in ((None, scores), (chosen + 100, scores[:, chosen])):
        out, want = torch.zeros(2, 3, dtype=torch.int64).unbind()
        logits = logits.contiguous()
        logits_kernel.best_token(logits, 100, out, ids, draws)
        logits_reference.best_token(logits, 100, want, ids, draws)
        assert torch.equal(out, want)
        assert out[1] == (logits[1].argmax() + 100 if ids is None else ids[logits[1].argmax()])
