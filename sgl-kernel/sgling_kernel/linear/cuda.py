"""Small-M matrix products in CUDA C++: bindings of this folder's sources, and what those cannot take.

How K is cut is a property of the weight's shape alone; a row's bits depend on that row alone for any number of rows.
"""

from functools import cache

import torch
from torch import Tensor

from sgling_kernel import cuda
from sgling_kernel.cuda.operands import why_not_dense, why_not_rows
from sgling_kernel.linear.table import Form, fastest_form, gpu_name, measured_rows

BLOCK_K = 32  # columns of one 16-byte load per lane
EIGHT_SLICES_UP_TO = 2560  # wider weights are cut into sixteen slices: part of the numerics
MAX_BLOCKS = 16  # of a slice
MAX_OUT = 16384  # from here on (lm_head) every weight is streamed, in sixteen slices
STREAM_WIDTHS = (2560, 5120)
GATED_HEADS, GATED_HEAD_DIM = (2, 4, 8, 16, 32), 128


def slicing(width: int) -> tuple[int, int]:
    """(slices, blocks of 32 columns in each) of a weight's K."""
    slices = 8 if width <= EIGHT_SLICES_UP_TO else 16
    return slices, -(-width // (BLOCK_K * slices))


def why_not_small_m(x: Tensor, w: Tensor) -> str | None:
    """Reason why the register form cannot take x [N, K] and w [O, K], or None."""
    if (reason := cuda.why_not() or why_not_rows("x", x) or why_not_dense("the weight", w)) is not None:
        return reason
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        return f"x {tuple(x.shape)} and the weight {tuple(w.shape)} are no operands of a product"
    if x.shape[1] % BLOCK_K or slicing(x.shape[1])[1] > MAX_BLOCKS:
        return f"K = {x.shape[1]} is no multiple of {BLOCK_K} up to {16 * MAX_BLOCKS * BLOCK_K}"
    return None if w.shape[0] < MAX_OUT else why_not_stream(w)


def why_not_stream(w: Tensor) -> str | None:
    """Reason why a weight that the operands' checks let pass cannot be streamed, or None."""
    if w.shape[1] not in STREAM_WIDTHS:
        return f"{w.shape[0]} outputs of K = {w.shape[1]}: weights from {MAX_OUT} on are streamed for K {STREAM_WIDTHS}"
    if w.is_cuda and cuda.device_capability() < (9, 0):
        return "weights are streamed from compute capability 9.0 on"
    return None


def small_m_linear(x: Tensor, w: Tensor, out_dtype: torch.dtype, form: Form | None = None) -> Tensor:
    """x bf16 [N, K] (rows may be strided) times w bf16 [O, K] transposed -> [N, O], ``out_dtype`` bf16 or fp32.

    form: where the weights wait, which changes no bit; None = as measured. "parked" is for slices of seven to
    ten blocks, "streamed" for weights of sixteen slices that :func:`why_not_stream` lets pass.
    """
    (count, width), outputs = x.shape, w.shape[0]
    out = torch.empty(count, outputs, dtype=out_dtype, device=x.device)
    if count == 0:
        return out
    if form is None:
        form = fastest_form(gpu_name(x.device.index), outputs, width, measured_rows(count))
    if form == "streamed" or outputs >= MAX_OUT:
        _stream(out, x, w, None)
        return out
    called = cuda.function("linear/small_m.cu", "small_m")
    shape = (count, x.stride(0), outputs, width, *slicing(width))
    cuda.launch(called, out, x, w, *shape, int(form == "parked"), int(out_dtype == torch.float32))
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    """CTAs that share one weight evenly; three in the emulation."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _share(w: Tensor) -> int:
    """Rows of a weight that one CTA takes where every multiprocessor has one CTA."""
    return -(-w.shape[0] // _multiprocessors(w.device))


def _stream(out: Tensor | None, x: Tensor, w: Tensor, best: tuple[Tensor, Tensor] | None) -> None:
    """The streaming form; best: (scores, columns) [N, CTAs]."""
    shape = (x.shape[0], x.stride(0), *w.shape, _share(w))
    fp32 = int(out is None or out.dtype == torch.float32)
    cuda.launch(cuda.function("linear/stream.cu", "stream"), out, x, w, *(best or (None, None)), *shape, fp32)


def why_not_best_parts(x: Tensor, w: Tensor) -> str | None:
    """Reason why :func:`best_parts` cannot take x [N, K] and w [O, K], or None."""
    if w.shape[0] < MAX_OUT:
        return f"{w.shape[0]} outputs: only products of {MAX_OUT} and more are streamed"
    return why_not_small_m(x, w)


def best_parts(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Best (score fp32, column int64) of each CTA's outputs of x w^T, both [N, CTAs]: lowest column wins, NaN never."""
    count, parts = x.shape[0], -(-w.shape[0] // _share(w))
    score = torch.empty(count, parts, dtype=torch.float32, device=x.device)
    column = torch.empty(count, parts, dtype=torch.int64, device=x.device)
    if count:
        _stream(None, x, w, (score, column))
    return score, column


def why_not_gated(o: Tensor, z: Tensor, norm_weight: Tensor, w: Tensor) -> str | None:
    """Reason why the folded form cannot take o [N, H, V], z [N, H·V], norm_weight [V] and w [O, H·V], or None."""
    heads, dim = o.shape[1:]
    if heads not in GATED_HEADS or dim != GATED_HEAD_DIM:
        return f"{heads} heads of {dim}: it takes {GATED_HEADS} heads of {GATED_HEAD_DIM}"
    if not (o.is_contiguous() and norm_weight.is_contiguous()) or norm_weight.dtype != torch.bfloat16:
        return "o and a bfloat16 norm weight must be contiguous"
    return why_not_rows("z", z, 4) or why_not_small_m(o.flatten(1), w)


def gated_linear(o: Tensor, z: Tensor, norm_weight: Tensor, eps: float, w: Tensor) -> Tensor:
    """reference.gated_linear_folded; the rows of z may be strided."""
    (count, heads, dim), outputs = o.shape, w.shape[0]
    out = torch.empty(count, outputs, dtype=o.dtype, device=o.device)
    if count:
        shape, z_aligned = (count, heads * dim, z.stride(0), outputs, heads), int(why_not_rows("z", z) is None)
        cuda.launch(cuda.function("linear/gated.cu", "gated"), out, o, z, norm_weight, w, *shape, z_aligned, eps)
    return out
