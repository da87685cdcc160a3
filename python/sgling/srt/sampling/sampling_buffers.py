"""Device-side sampling parameters of the running requests, one entry per request row.

The operators index these tables by row inside the graphs, so batches change without moving anything. Small tables exist
from the start. The vocabulary-wide ones (4 bytes, 1, 4 and 1 per row and token) are allocated when the first request
needs them, or by :meth:`SamplingBuffers.allocate` before graphs are captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from sgling.srt.sampling.sampling_params import SamplingParams
from sgling_kernel.sampling import SamplingFlags, SamplingTables


class RowScalars(NamedTuple):
    """Host copy of a row's scalar parameters; field names are those of :class:`SamplingTables`."""

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_len_limit: int = 0


class RowSnapshot(NamedTuple):
    """Everything a retracted request needs to resume sampling; CPU tensors [V_local], None where unused."""

    scalars: RowScalars
    flags: SamplingFlags
    counts: torch.Tensor | None
    prompt_seen: torch.Tensor | None
    bias: torch.Tensor | None
    stop_mask: torch.Tensor | None


NEUTRAL_ROW = RowScalars()
_INTEGER_SCALARS = ("top_k", "seed", "min_len_limit")
_WIDE_DTYPES = {  # table: (dtype, flag that needs it)
    "counts": (torch.int32, "penalties"),
    "prompt_seen": (torch.bool, "penalties"),
    "bias": (torch.float32, "logit_bias"),
    "stop_mask": (torch.bool, "min_tokens"),
}


class SamplingBuffers:
    """Owner of the :class:`SamplingTables`; row 0 is the neutral dummy of padded rows.

    Written by the scheduler between steps (on the forward stream, so that steps in flight keep their values) and, for
    ``counts``, by ``commit_counts`` inside the step. Writing never reads from the device.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: str, vocab_start: int = 0):
        """``num_rows`` = R, dummy included; ``vocab_size`` tokens of this rank's shard from id ``vocab_start`` on."""
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.vocab_start = vocab_start
        self.device = device
        self._flags = [SamplingFlags()] * num_rows
        self._scalars = [NEUTRAL_ROW] * num_rows
        columns = {
            name: torch.full((num_rows,), value, dtype=_scalar_dtype(name), device=device)
            for name, value in NEUTRAL_ROW._asdict().items()
        }
        self.tables = SamplingTables(**columns, vocab_start=vocab_start, **dict.fromkeys(_WIDE_DTYPES))

    def allocate(self, flags: SamplingFlags) -> None:
        """Allocate the vocabulary-wide tables that ``flags`` need and that do not exist yet (zero = neutral)."""
        missing = {
            name: torch.zeros(self.num_rows, self.vocab_size, dtype=dtype, device=self.device)
            for name, (dtype, flag) in _WIDE_DTYPES.items()
            if getattr(flags, flag) and getattr(self.tables, name) is None
        }
        if missing:
            self.tables = self.tables._replace(**missing)

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        seed: int,
        eos_ids: Iterable[int],
        min_len_limit: int,
    ) -> None:
        """Install a request's normalised, verified parameters in ``row``; nothing of the row's last owner remains.

        ``seed``: int64 used for the noise (the request's own or one the scheduler drew). ``min_len_limit``: first
        position at which ``eos_ids`` or the request's stop ids may be emitted (prompt length + min_new_tokens).
        """
        flags = _flags_of(params)
        limit = min_len_limit if flags.min_tokens else 0
        scalars = RowScalars(
            *(getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")),
            seed=seed,
            frequency_penalty=params.frequency_penalty + 0.0,  # no -0.0: neutral rows keep their bits
            presence_penalty=params.presence_penalty + 0.0,
            repetition_penalty=params.repetition_penalty,
            min_len_limit=limit,
        )
        self._install(row, scalars, flags)
        if flags.penalties:
            self._fill(self.tables.prompt_seen[row], sorted(set(prompt_ids)), True)
        if flags.logit_bias:
            self._fill(self.tables.bias[row], list(params.logit_bias), list(params.logit_bias.values()))
        if flags.min_tokens:
            self._fill(self.tables.stop_mask[row], sorted({*eos_ids, *params.stop_token_ids}), True)

    def clear_row(self, row: int) -> None:
        """Make ``row`` neutral (greedy, no adjustments)."""
        self._install(row, NEUTRAL_ROW, SamplingFlags())

    def flags_for(self, rows: Iterable[int]) -> SamplingFlags:
        """What a batch of these rows needs; host only."""
        flags = SamplingFlags()
        for row in rows:
            flags = flags.union(self._flags[row])
        return flags

    def snapshot_row(self, row: int) -> RowSnapshot:
        """Copy a row to the host (waits for the device; used on retraction, after the row's last step)."""
        flags = self._flags[row]
        wide = {
            name: getattr(self.tables, name)[row].cpu().clone() if getattr(flags, flag) else None
            for name, (_, flag) in _WIDE_DTYPES.items()
        }
        return RowSnapshot(self._scalars[row], flags, **wide)

    def restore_row(self, row: int, snapshot: RowSnapshot) -> None:
        """Install a snapshot in ``row``, which need not be the row it came from."""
        self._install(row, snapshot.scalars, snapshot.flags)
        for name in _WIDE_DTYPES:
            saved = getattr(snapshot, name)
            if saved is not None:
                getattr(self.tables, name)[row].copy_(saved)

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(table.nbytes for table in self.tables if isinstance(table, torch.Tensor))

    def _install(self, row: int, scalars: RowScalars, flags: SamplingFlags) -> None:
        """Write scalars and flags; zero the vocabulary-wide rows (a step may have counted into any of them)."""
        if not 0 < row < self.num_rows:
            raise IndexError(f"sampling row {row} is outside [1, {self.num_rows})")
        self.allocate(flags)
        self._flags[row], self._scalars[row] = flags, scalars
        for name, value in scalars._asdict().items():
            getattr(self.tables, name)[row].fill_(value)
        for name in _WIDE_DTYPES:
            table = getattr(self.tables, name)
            if table is not None:
                table[row].zero_()

    def _fill(self, target: torch.Tensor, ids: list[int], values: list[float] | bool) -> None:
        """``target[id - vocab_start] = value`` for the ids of this shard; ``target`` is one row [V_local]."""
        local = [i for i, token_id in enumerate(ids) if 0 <= token_id - self.vocab_start < self.vocab_size]
        if not local:
            return
        index = self._to_device(torch.tensor([ids[i] - self.vocab_start for i in local]))
        if isinstance(values, bool):
            target.index_fill_(0, index, values)
        else:
            target.index_copy_(0, index, self._to_device(torch.tensor([values[i] for i in local])))

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Asynchronous on a GPU: a copy from pageable memory would wait for every step in flight."""
        return host if self.device == "cpu" else host.pin_memory().to(self.device, non_blocking=True)


def _scalar_dtype(name: str) -> torch.dtype:
    return torch.int64 if name in _INTEGER_SCALARS else torch.float32


def _flags_of(params: SamplingParams) -> SamplingFlags:
    """What one request needs."""
    sampled = not params.is_greedy
    return SamplingFlags(
        sampled=sampled,
        penalties=(params.frequency_penalty, params.presence_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0),
        logit_bias=bool(params.logit_bias),
        min_tokens=params.min_new_tokens > 0,
        top_k=sampled and params.top_k >= 1,
        top_p=sampled and params.top_p < 1.0,
        min_p=sampled and params.min_p > 0.0,
    )
