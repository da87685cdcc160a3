"""The model's own consistency: decode = prefill, verify = decode, commit, taps, clamps, NEXTN semantics."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model.driver import Driver, join, load, padded_row, prompt_ids
from model.tiny_model import tiny_config, write_tiny_checkpoint
from sgling.srt.core.forward_batch import ForwardMode
from sgling.srt.layers.attention.base import AttentionBackend, AttentionContext
from sgling.srt.layers.attention.hybrid import HybridLinearAttnBackend
from sgling.srt.layers.attention.kda import KDAAttnBackend
from sgling.srt.layers.attention.mla import MLAAttnBackend
from sgling_kernel.linear import fixed_rows

PROMPT = prompt_ids(70)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), with_nextn=True, tap_layers=(-1, 1, 3))


def close(a, b, tolerance=2e-4):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def test_decode_continues_prefill(loaded):
    whole = Driver(loaded).prefill(PROMPT).hidden
    driver = Driver(loaded)
    driver.prefill(PROMPT[:64])
    stepwise = torch.cat([driver.decode(token).hidden for token in PROMPT[64:]])
    close(stepwise, whole[64:])


@pytest.mark.parametrize("rollback", ["staged", "replay"])
@pytest.mark.parametrize("accept", [1, 3, 4])
def test_verify_and_commit_equal_decode_steps(loaded, rollback, accept):
    """With products in fixed-row blocks every bit agrees: hidden rows, KDA state, conv window, next step."""
    window = PROMPT[64:68]
    with fixed_rows(4):
        plain, speculative = Driver(loaded, rollback=rollback), Driver(loaded, rollback=rollback)
        plain.prefill(PROMPT[:64])
        speculative.prefill(PROMPT[:64])
        before = speculative.pools.state.temporal.clone()
        rows = speculative.verify(window).hidden
        assert torch.equal(before, speculative.pools.state.temporal), "verify must not touch the working state"
        speculative.commit(accept, len(window))
        steps = torch.cat([plain.decode(token).hidden for token in window[:accept]])
        assert torch.equal(rows[:accept], steps)
        for pool in ("temporal", "conv"):
            ours, theirs = (getattr(driver.pools.state, pool)[:, 1:] for driver in (speculative, plain))
            assert torch.equal(ours, theirs), pool
        after = [driver.decode(9).hidden for driver in (plain, speculative)]
        assert torch.equal(*after)


@pytest.mark.parametrize("width", [1, 4])
def test_batch_neighbours_and_padding_change_nothing(loaded, width):
    """Two requests of different length and two padded rows in one batch; every dummy starts as NaN."""
    mode = ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY
    windows = [PROMPT[:width], PROMPT[20 : 20 + width]]

    def pair():
        first = Driver(loaded)
        second = Driver(loaded, beside=first)
        first.prefill(PROMPT)
        second.prefill(PROMPT[5:40])
        return first, second

    with fixed_rows(4):
        alone = torch.cat(
            [loaded.target.forward(d.batch(mode, ids), d.pools).hidden for d, ids in zip(pair(), windows, strict=True)]
        )
        drivers = pair()
        pools = drivers[0].pools
        for pool in (pools.kv.buffer[:, 0], pools.state.temporal[:, 0], pools.state.conv[:, 0]):
            pool.fill_(float("nan"))
        batches = [driver.batch(mode, ids) for driver, ids in zip(drivers, windows, strict=True)]
        padding = [padded_row(width, drivers[0].capacity, mode)] * 2
        together = loaded.target.forward(join(*batches, *padding), pools).hidden
    assert torch.equal(together[: 2 * width], alone)


def test_only_the_requests_own_slots_change(loaded):
    driver = Driver(loaded)
    driver.prefill(PROMPT[:8])
    state = driver.pools.state
    assert not state.temporal[:, [0, 1, 3]].any() and not state.conv[:, [0, 1, 3]].any()
    used = driver.pools.req_to_token[1, :8]
    rest = torch.ones(driver.pools.kv.buffer.shape[1], dtype=torch.bool)
    rest[used] = False
    assert not driver.pools.kv.buffer[:, rest].any()


def test_taps_are_the_streams_after_their_layers(loaded):
    """A tap equals what a model cut off after that layer would hand to its final norm."""
    driver = Driver(loaded)
    taps = driver.prefill(PROMPT[:20]).taps.split(64, dim=-1)
    target = loaded.target
    batch = Driver(loaded).batch(ForwardMode.EXTEND, PROMPT[:20])
    pools = Driver(loaded).pools
    context = target.attn_backend.init_forward_metadata_in_graph(batch, pools)
    stream = target.embed_tokens.forward(batch.input_ids)
    close(taps[0], stream, 0)
    for layer_id, layer in enumerate(target.layers[:4]):
        out, residual = layer.forward(layer.input_layernorm.forward(stream), stream, context)
        stream = out + residual
        if layer_id in (1, 3):
            close(taps[1 if layer_id == 1 else 2], stream)


@pytest.mark.parametrize("taps", [(1, 1), (3, 1), (4,), (-2,)])
def test_impossible_taps_are_refused(tmp_path, taps):
    with pytest.raises(ValueError, match="tap_layers"):
        load(write_tiny_checkpoint(tmp_path), tap_layers=taps)


def test_clamps_bind_and_routed_differs_from_shared(tmp_path):
    """Exchanging the two lists, or dropping either, changes the output: both limits act, each on its own expert."""
    routed, shared = [tiny_config()[key] for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")]
    variants = {
        "as is": (routed, shared),
        "swapped": (shared, routed),
        "no routed": (None, shared),
        "no shared": (routed, None),
    }
    outputs = {}
    for name, (first, second) in variants.items():
        limits = {"expert_swiglu_limit_list": first, "share_expert_swiglu_limit_list": second}
        directory = write_tiny_checkpoint(tmp_path / name, **limits)
        outputs[name] = Driver(load(directory)).prefill(PROMPT).hidden
    for name in ("swapped", "no routed", "no shared"):
        assert (outputs[name] - outputs["as is"]).abs().max() > 1e-2, name


def test_layer_limits_reach_the_layers(loaded):
    limits = [(layer.mlp.experts.limit, layer.mlp.shared.limit) for layer in loaded.target.layers[1:]]
    assert limits == [(None, None), (None, 0.5), (0.4, 0.5), (0.4, 0.7)]
    mlp = loaded.nextn.layer.mlp
    assert (mlp.experts.limit, mlp.shared.limit) == (None, None)


class TestNextN:
    """Position p: embedding of token p + 1 with the target's hidden state of p; KV at slot p of the draft pool."""

    def _prefill(self, loaded, chunk=10**9):
        driver = Driver(loaded)
        hidden = driver.prefill(PROMPT).hidden
        shifted = [*PROMPT[1:], 7]
        outputs = []
        for start in range(0, len(shifted), chunk):
            batch = driver.batch(ForwardMode.DRAFT_PREFILL, shifted[start : start + chunk], start)
            outputs.append(loaded.nextn.forward(batch, hidden[start : start + chunk], driver.pools))
        return driver, hidden, torch.cat(outputs)

    def test_prefill_in_chunks_equals_one_chunk(self, loaded):
        close(self._prefill(loaded, chunk=32)[2], self._prefill(loaded)[2])

    def test_extend_rows_equal_prefill_rows(self, loaded):
        driver, hidden, whole = self._prefill(loaded)
        batch = driver.batch(ForwardMode.DRAFT_EXTEND, [*PROMPT[67:], 7], start=66)
        close(loaded.nextn.forward(batch, hidden[66:], driver.pools), whole[66:])

    def test_chained_decode_feeds_its_output_back(self, loaded):
        driver, _, whole = self._prefill(loaded)
        first = loaded.nextn.forward(driver.batch(ForwardMode.DRAFT_DECODE, [11]), whole[-1:], driver.pools)
        rows = torch.cat((whole[-1:], first))
        batch = driver.batch(ForwardMode.DRAFT_EXTEND, [11, 12])
        both = loaded.nextn.forward(batch, rows, driver.pools)
        close(both[:1], first)
        assert loaded.nextn.logits(both).shape == (2, 512) and loaded.nextn.logits(both).dtype is torch.float32

    def test_draft_touches_only_the_draft_cache(self, loaded):
        driver = Driver(loaded)
        batch = driver.batch(ForwardMode.DRAFT_PREFILL, PROMPT[:8])
        loaded.nextn.forward(batch, torch.randn(8, 64), driver.pools)
        assert not driver.pools.kv.buffer.any() and not driver.pools.state.temporal.any()
        assert driver.pools.draft_kv.buffer[0, driver.pools.req_to_token[1, :8]].any(-1).all()

    def test_embedding_half_comes_first(self, loaded):
        """By hand: eh_proj over [enorm(embedding) | hnorm(hidden)]; with the halves exchanged the result differs."""
        driver, nextn = Driver(loaded), loaded.nextn
        hidden_in, batch = torch.randn(8, 64), driver.batch(ForwardMode.DRAFT_PREFILL, PROMPT[:8])
        expected = nextn.forward(batch, hidden_in, driver.pools)
        embedded = nextn.enorm.forward(nextn.embed_tokens.forward(batch.input_ids))
        halves = (embedded, nextn.hnorm.forward(hidden_in))
        results = [self._layer(nextn, driver, batch, torch.cat(pair, -1)) for pair in (halves, halves[::-1])]
        close(results[0], expected)
        assert (results[1] - expected).abs().max() > 0.1

    @staticmethod
    def _layer(nextn, driver, batch, joined):
        mla = nextn.attn_backend.init_forward_metadata_in_graph(batch, driver.pools)
        context = AttentionContext(batch, driver.pools.draft_kv, mla, ())
        stream = joined @ nextn.eh_proj.weight.T
        out, residual = nextn.layer.forward(nextn.layer.input_layernorm.forward(stream), stream, context)
        return nextn.final_layernorm.forward(out + residual)

    def test_pools_without_a_draft_cache_are_refused(self, loaded):
        driver = Driver(loaded)
        batch = driver.batch(ForwardMode.DRAFT_PREFILL, PROMPT[:8])
        with pytest.raises(ValueError, match="draft KV"):
            loaded.nextn.forward(batch, torch.randn(8, 64), driver.pools._replace(draft_kv=None))


class TestNeedsCpuSeqLens:
    def test_default_is_true_and_the_built_backends_declare_false(self, loaded):
        assert AttentionBackend.needs_cpu_seq_lens is True
        assert loaded.target.attn_backend.needs_cpu_seq_lens is False
        assert loaded.nextn.attn_backend.needs_cpu_seq_lens is False

    @pytest.mark.parametrize("needy", ["full", "linear"])
    def test_hybrid_is_the_or_of_its_children(self, needy):
        backend = HybridLinearAttnBackend(MLAAttnBackend(1.0), KDAAttnBackend())
        getattr(backend, needy).needs_cpu_seq_lens = True
        assert backend.needs_cpu_seq_lens is True

    @pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
    def test_forward_reads_no_device_value_on_the_host(self, loaded, mode):
        """Under fake tensors any host read raises, so what runs here can be recorded in a graph."""
        driver = Driver(loaded)
        ids = [5] if mode is ForwardMode.DECODE else [5, 6, 7, 8]
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            batch = driver.batch(mode, ids)
            batch = batch._replace(
                **{k: fake.from_tensor(v) for k, v in batch._asdict().items() if isinstance(v, torch.Tensor)}
            )
            assert loaded.target.forward(batch, driver.pools).hidden.shape == (len(ids), 64)


def test_kda_refuses_draft_modes(loaded):
    driver = Driver(loaded)
    with pytest.raises(ValueError, match="KDA layers do not run in mode"):
        loaded.target.forward(driver.batch(ForwardMode.DRAFT_DECODE, [5]), driver.pools)


def test_verify_without_a_rollback_store_is_refused(loaded):
    driver = Driver(loaded)
    batch = driver.batch(ForwardMode.TARGET_VERIFY, [5, 6])
    with pytest.raises(ValueError, match="rollback"):
        loaded.target.forward(batch, driver.pools._replace(rollback=None))


def test_bf16_stays_close_to_fp32(tmp_path):
    directory = write_tiny_checkpoint(tmp_path)
    exact = Driver(load(directory)).prefill(PROMPT).hidden
    loaded = load(directory, dtype=torch.bfloat16)
    driver = Driver(loaded, dtype=torch.bfloat16)
    rounded = driver.prefill(PROMPT).hidden
    assert rounded.dtype is torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(rounded.float(), exact)
    assert cosine.median() > 0.995
    assert driver.decode(5).hidden.dtype is torch.bfloat16
    assert loaded.target.logits(rounded).dtype is torch.float32
