"""Experts in CUDA C++: up with SwiGLU (up.cu), down (down.cu), and what is left behind them (finish.cu)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sgling_kernel import cuda
from sgling_kernel.cuda.operands import why_not_dense, why_not_rows
from sgling_kernel.moe.outputs import ExpertOutputs
from sgling_kernel.moe.weights import ExpertWeights

HIDDEN_SIZES = (256, 1536, 2560)  # K slices of the up product are a property of the size
MAX_PAIRS, MAX_TOP = 1280, 8
MAX_WALKED_EXPERTS = 1024
_EMULATED_CTAS, _ROW_CTAS = 3, 4
_WALK_ROWS = 2  # from which walking is faster
_WALK_SHARED_BYTES = 192 * 1024  # of the up product: two stages of 2560 columns, sums, experts
_WALK_DOWN_TILES, _WALK_DOWN_PLACE_BYTES = 24, 8 * 1024  # of the down product: tiles of 16 rows in its rings, experts


def why_not_experts(x: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, ids: Tensor) -> str | None:
    """Reason why these kernels cannot serve a decode-sized batch, or None."""
    weights = [experts.w13, experts.w2, *(shared[:2] if shared else ())]
    if any(tensor.dtype != torch.bfloat16 for tensor in (x, *weights)):
        return f"the CUDA experts take bf16, not {x.dtype} and {experts.w13.dtype}"
    if x.shape[1] not in HIDDEN_SIZES or experts.w2.shape[-1] % 32:
        return f"hidden size {x.shape[1]}, width {experts.w2.shape[-1]}: built for {HIDDEN_SIZES} and multiples of 32"
    if not all(weight.is_contiguous() and weight.data_ptr() % 16 == 0 for weight in weights):
        return "expert weights must be row major"
    if (reason := why_not_rows("the input", x)) is not None:
        return reason
    if ids.shape[1] > MAX_TOP or ids.numel() > MAX_PAIRS:
        return f"{ids.shape[0]} rows of {ids.shape[1]} experts: at most {MAX_PAIRS} pairs and {MAX_TOP} a row"
    if shared is not None and shared.w2.shape != experts.w2.shape[1:]:
        return f"shared expert of shape {tuple(shared.w2.shape)} beside routed ones of {tuple(experts.w2.shape[1:])}"
    return cuda.why_not()


@cache
def _walkers(device: torch.device, shared_bytes: int = _WALK_SHARED_BYTES) -> int:
    """CTAs that can walk: one per multiprocessor, if it has the shared memory; before 9.0 there are none."""
    if device.type != "cuda":
        return _EMULATED_CTAS
    properties = torch.cuda.get_device_properties(device)
    fits = cuda.has_bulk_copies() and properties.shared_memory_per_block_optin >= shared_bytes
    return properties.multi_processor_count if fits else 0


def up(x: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, ids: Tensor, ctas: int | None = None) -> Tensor:
    """SwiGLU of the up products: x [N, d] -> [N, slots, I], the shared expert last.

    ``ctas`` picks the form, which changes no bit: 0 = a CTA per pair and tile, else that many CTAs over the distinct
    experts. Default: the former below ``_WALK_ROWS`` rows, above ``MAX_WALKED_EXPERTS`` experts and before compute
    capability 9.0, else one CTA per multiprocessor.
    """
    (rows, dim), top, width = x.shape, ids.shape[1], experts.w2.shape[-1]
    hidden = torch.empty(rows, top + (shared is not None), width, dtype=x.dtype, device=x.device)
    if ctas is None:
        ctas = 0 if rows < _WALK_ROWS or experts.w13.shape[0] > MAX_WALKED_EXPERTS else _walkers(x.device)
    cuda.launch(
        cuda.function("moe/up.cu", "experts_up"), hidden, x, experts.w13, shared and shared.w13, ids,
        x.stride(0), rows, top, experts.w13.shape[0], dim, width,
        float(experts.limit or 0), float(shared.limit or 0) if shared else 0.0, ctas,
    )  # fmt: skip
    return hidden


def down(
    hidden: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, ids: Tensor, ctas: int | None = None
) -> Tensor:
    """Down products: hidden [N, slots, I] -> fp32 [N, slots, d]. Must follow ``up`` (ids are read early).

    ``ctas`` as in ``up``; without walking, a CTA serves an expert for 64 values of its rows.
    """
    (rows, slots, width), (count, dim, _) = hidden.shape, experts.w2.shape
    values = torch.empty(rows, slots, dim, dtype=torch.float32, device=hidden.device)
    if ctas is None:
        shared_bytes = _WALK_DOWN_TILES * 16 * width * 2 + _WALK_DOWN_PLACE_BYTES
        walks = rows >= _WALK_ROWS and count <= MAX_WALKED_EXPERTS
        ctas = _walkers(hidden.device, shared_bytes) if walks else 0
    cuda.launch(
        cuda.function("moe/down.cu", "experts_down"), values, hidden, experts.w2, shared and shared.w2, ids,
        rows, ids.shape[1], count, dim, width, ctas,
    )  # fmt: skip
    return values


def expert_outputs(
    x: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, weights: Tensor, ids: Tensor
) -> ExpertOutputs:
    """Both products of the routed experts and the shared one, in two nodes."""
    weights, ids = weights.contiguous(), ids.contiguous()
    if x.shape[0] == 0:
        slots = ids.shape[1] + (shared is not None)
        return ExpertOutputs(torch.empty(0, slots, x.shape[1], device=x.device), weights, x.dtype)
    return ExpertOutputs(down(up(x, experts, shared, ids), experts, shared, ids), weights, x.dtype)


def row_ctas(dim: int) -> int:
    """CTAs that share a row's finish: as many as divide its warps (four columns a thread), without any change of bits.

    One in the emulation and before compute capability 9.0, which have no clusters.
    """
    warps = -(-dim // 128)
    if not cuda.has_clusters():
        return 1
    return next(ctas for ctas in (_ROW_CTAS, 2, 1) if warps % ctas == 0)


def combine(outputs: ExpertOutputs, ctas: int | None = None) -> Tensor:
    """reference.combine; ``ctas`` to a row (row_ctas)."""
    rows, _, dim = outputs.values.shape
    out = torch.empty(rows, dim, dtype=outputs.dtype, device=outputs.values.device)
    if rows:
        cuda.launch(
            cuda.function("moe/finish.cu", "combine"), out, outputs.values, outputs.weights,
            rows, outputs.weights.shape[1], dim, int(outputs.has_shared), ctas or row_ctas(dim),
        )  # fmt: skip
    return out


def why_not_finish(residual: Tensor, weight: Tensor) -> str | None:
    """Reason why the sum over slots cannot take this residual add and norm over, or None."""
    return why_not_rows("the residual", residual, 8) or why_not_dense("the weight", weight) or cuda.why_not()


def combine_add_rms_norm(
    outputs: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float, ctas: int | None = None
) -> tuple[Tensor, Tensor]:
    """reference.combine_add_rms_norm; must follow ``expert_outputs``, and the residual must be older than it.

    Routing weights and residual are read early. ``ctas`` to a row (row_ctas).
    """
    rows, _, dim = outputs.values.shape
    out = torch.empty(2, rows, dim, dtype=outputs.dtype, device=outputs.values.device)
    if rows:
        cuda.launch(
            cuda.function("moe/finish.cu", "combine_add_rms_norm"), out[0], out[1], outputs.values, outputs.weights,
            residual, residual.stride(0), weight, rows, outputs.weights.shape[1], dim, int(outputs.has_shared), eps,
            ctas or row_ctas(dim),
        )  # fmt: skip
    return out[0], out[1]


def why_not_swiglu(gu: Tensor) -> str | None:
    """Reason why the elementwise kernel cannot serve gu [N, 2I], or None."""
    if gu.shape[1] % 8:
        return f"rows of {gu.shape[1]} values: the CUDA SwiGLU takes a multiple of 8"
    return why_not_rows("the gate/up product", gu) or cuda.why_not()


def swiglu(gu: Tensor, limit: float | None) -> Tensor:
    """reference.swiglu for gu [N, 2I]."""
    rows, width = gu.shape[0], gu.shape[1] // 2
    out = torch.empty(rows, width, dtype=gu.dtype, device=gu.device)
    if rows:
        cuda.launch(cuda.function("moe/swiglu.cu", "swiglu"), out, gu, gu.stride(0), rows, width, float(limit or 0))
    return out
