"""KDA prefill: the chunk form against the recurrence, FLA's naive form and itself in pieces; rounding points."""

import math
import time

import pytest
import torch
import torch.nn.functional as F

from ops.kda_case import make_params, make_pools, make_rows, same_bits
from sgling_kernel.kda import cpu, kda_decode, kda_prefill, reference
from sgling_kernel.kda.recurrence import short_conv

HEADS, DIM = 4, 64
GATES = {"mixed": (0.0, 1.0), "near_lower_bound": (8.0, 1.0), "near_zero": (-8.0, 1.0), "both_ends": (0.0, 12.0)}


def start(dtype=torch.float32, heads=HEADS, dim=DIM):
    """A conv window and a state in mid-conversation."""
    return torch.randn(3, 3 * heads * dim).to(dtype), torch.randn(heads, dim, dim) * 0.3


def assert_close(got, want, tolerance):
    """Largest error relative to the largest value, for output, window and state alike."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("gate", GATES)
def test_chunk_form_equals_the_recurrence_for_any_length(gate):
    for tokens in (1, 2, 3, 15, 16, 17, 63, 64, 65, 130, 200):
        p, rows, begin = make_params(HEADS, DIM, *GATES[gate]), make_rows(tokens, HEADS, DIM), start()
        assert_close(kda_prefill(*rows, p, *begin), reference.kda_prefill(*rows, p, *begin), 1e-5)


def test_chunk_form_equals_the_recurrence_across_segments():
    tokens = cpu.SEGMENT + 70
    p, rows, begin = make_params(2, 32), make_rows(tokens, 2, 32), start(heads=2, dim=32)
    assert_close(kda_prefill(*rows, p, *begin), reference.kda_prefill(*rows, p, *begin), 1e-5)


@pytest.mark.parametrize("gate", GATES)
def test_chunk_form_is_exact_algebra_in_fp64(gate):
    p = make_params(2, 32, *GATES[gate], dtype=torch.float64)
    rows = make_rows(150, 2, 32, torch.float64)
    window, state = start(torch.float64, 2, 32)
    begin = (window, state.double())
    kept = [t.clone() for t in (*rows, *begin)]
    assert_close(kda_prefill(*rows, p, *begin), reference.kda_prefill(*rows, p, *begin), 1e-13)
    assert all(torch.equal(a, b) for a, b in zip(kept, (*rows, *begin), strict=True)), "inputs must stay as they are"


def test_recurrent_prefill_is_decode_bit_for_bit():
    p, rows, pools = make_params(HEADS, DIM), make_rows(20, HEADS, DIM), make_pools(1, 2, HEADS, DIM)
    out, window, state = reference.kda_prefill(*rows, p, pools.conv[0, 1], pools.state[0, 1])
    for t in range(20):
        one = kda_decode(*rows.pick(slice(t, t + 1)), p, *pools.layer(0), torch.tensor([1]))
        assert same_bits(one[0], out[t])
    assert same_bits(pools.conv[0, 1], window) and same_bits(pools.state[0, 1], state)


@pytest.mark.parametrize("cut", [1, 2, 3, 16, 50, 64, 100, 149])
def test_any_split_with_window_and_state_carried_over_equals_one_shot(cut):
    p, rows, begin = make_params(HEADS, DIM), make_rows(150, HEADS, DIM), start()
    head, window, state = kda_prefill(*rows.pick(slice(0, cut)), p, *begin)
    tail, window, state = kda_prefill(*rows.pick(slice(cut, None)), p, window, state)
    assert_close((torch.cat([head, tail]), window, state), kda_prefill(*rows, p, *begin), 1e-5)


def independent_inputs(rows, p, window):
    """q, k, v, g, beta by library functions instead of ours: fp64, rounded to the model dtype after the conv."""
    dtype, (heads, dim) = rows.qkv.dtype, p.dt_bias.shape
    x = torch.cat([window, rows.qkv]).double().t().unsqueeze(0)
    y = F.silu(F.conv1d(x, p.conv_weight.double().unsqueeze(1), groups=x.shape[1]))[0].t().to(dtype).double()
    q, k, v = y.unflatten(1, (3, heads, dim)).unbind(1)
    q, k = (t / torch.sqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    f = rows.f.double().unflatten(1, (heads, dim)) + p.dt_bias.double()
    g = p.lower_bound * torch.sigmoid(p.a_log.double().exp()[:, None] * f)
    return q, k, v, g, torch.sigmoid(rows.b.double())


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_agrees_with_fla_naive(form, dtype, tolerance):
    naive = pytest.importorskip("fla.ops.kda.naive")
    p, rows, (window, state) = make_params(HEADS, DIM), make_rows(128, HEADS, DIM, dtype), start(dtype)
    inputs = (t.float().unsqueeze(0) for t in independent_inputs(rows, p, window))
    oracle = {"recurrent": naive.naive_recurrent_kda, "chunk": naive.naive_chunk_kda}[form]
    want, want_state = oracle(*inputs, initial_state=state.mT.unsqueeze(0), output_final_state=True)
    for op in (kda_prefill, reference.kda_prefill):
        out, _, got_state = op(*rows, p, window, state)
        assert out.dtype == dtype
        assert_close((out.float(), got_state), (want[0], want_state[0].mT), tolerance)


def test_conv_is_rounded_to_the_model_dtype_before_the_recurrence():
    """With β = 1, g = 0-ish and an empty state, one token writes v k̂ᵀ: v must be a bf16 number, taps oldest first."""
    p = make_params(1, 32, bias=-60.0, spread=0.0)
    rows = make_rows(1, 1, 32, torch.bfloat16)
    rows.b.fill_(40.0)
    window = torch.randn(3, 96).bfloat16()
    _, k, v, _, _ = (t.float() for t in independent_inputs(rows, p, window))
    _, new_window, state = kda_prefill(*rows, p, window, torch.zeros(1, 32, 32))
    torch.testing.assert_close(state[0], v[0, 0, :, None] * k[0, 0, None, :], rtol=1e-6, atol=1e-7)
    assert torch.equal(new_window, torch.cat([window[1:], rows.qkv]))


def test_conv_taps_are_summed_oldest_to_newest_in_fp32():
    rows = torch.tensor([1e8, -1e8, 1.0, 1.0]).view(1, 4, 1)  # from the newest end the two ones would be lost
    assert short_conv(rows, torch.ones(1, 4), torch.float32).item() == pytest.approx(2.0 / (1.0 + math.exp(-2.0)))
    taps = short_conv(torch.eye(4)[:, :, None], torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.float32).flatten()
    torch.testing.assert_close(taps, F.silu(torch.tensor([1.0, 2.0, 3.0, 4.0])))


def test_zero_tokens_and_an_unsafe_gate_bound_are_refused():
    p, begin = make_params(1, 32), start(heads=1, dim=32)
    for op in (kda_prefill, reference.kda_prefill):
        with pytest.raises(ValueError, match="at least one token"):
            op(*make_rows(0, 1, 32), p, *begin)
    with pytest.raises(ValueError, match="lower_bound"):
        kda_prefill(*make_rows(4, 1, 32), p._replace(lower_bound=-11.0), *begin)


def test_prefill_time_is_linear_in_tokens():
    p, begin, best = make_params(HEADS, DIM), start(), {4096: float("inf"), 8192: float("inf")}
    rows = make_rows(8192, HEADS, DIM)
    for _ in range(12):
        for tokens in best:
            before = time.process_time()
            kda_prefill(*rows.pick(slice(0, tokens)), p, *begin)
            best[tokens] = min(best[tokens], time.process_time() - before)
        if best[8192] / best[4096] <= 2.2:
            return
    pytest.fail(f"8192 tokens take {best[8192] / best[4096]:.2f} times as long as 4096")
