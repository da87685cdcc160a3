"""Tensor-parallel group of one engine: rank, size, and the few collectives a forward and a scheduler need.

Sums are taken in fp32 in rank order on every rank (gather, then add), so all ranks hold the same bits and a run does
not depend on the backend's reduction tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ParallelState:
    """One rank's view of the tensor-parallel group.

    Attributes:
        rank: this process, 0 <= rank < size.
        size: number of ranks; every sharded dimension is cut into ``size`` equal parts.
        group: process group of device tensors, None when size is 1.
        host_group: process group of host bytes (gloo), None when size is 1.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    host_group: dist.ProcessGroup | None

    @classmethod
    def single(cls) -> ParallelState:
        """The group of one process: every collective is the identity."""
        return cls(rank=0, size=1, group=None, host_group=None)

    def shard(self, length: int) -> tuple[int, int]:
        """(start, size) of this rank's part of a dimension.

        Raises:
            ValueError: the dimension does not split into equal parts.
        """
        part, rest = divmod(length, self.size)
        if rest:
            raise ValueError(f"dimension of {length} does not split over {self.size} ranks")
        return self.rank * part, part

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of every rank, [size, *x.shape]; collective."""
        if self.size == 1:
            return x[None]
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1) if x.dim() else out, x if x.dim() else x[None], group=self.group)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks in rank order, fp32 accumulation, one rounding to ``x.dtype``; collective."""
        if self.size == 1:
            return x
        parts = self.all_gather(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """``data`` of rank ``source`` on every rank; the others pass None; collective over the host group."""
        if self.size == 1:
            if data is None:
                raise ValueError("the source rank must pass the bytes to broadcast")
            return data
        length = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
        dist.broadcast(length, source, group=self.host_group)
        if self.rank == source:
            payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        else:
            payload = torch.empty(max(1, int(length)), dtype=torch.uint8)
        dist.broadcast(payload, source, group=self.host_group)
        return bytes(payload[: int(length)].numpy())

    def smallest(self, value: int) -> int:
        """The smallest of every rank's ``value`` (int64), on every rank; collective over the host group."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.host_group)
        return int(shared)

    def barrier(self) -> None:
        """Wait for every rank; collective over the host group."""
        if self.size > 1:
            dist.barrier(group=self.host_group)

    def close(self) -> None:
        """Leave the process groups; every rank calls it once."""
        if self.size > 1:
            dist.destroy_process_group()


def init_parallel(rank: int, size: int, init_method: str, backend: str) -> ParallelState:
    """Join the tensor-parallel group.

    Args:
        rank, size: this process and the number of processes.
        init_method: rendezvous address of torch.distributed, for example ``tcp://127.0.0.1:29500``.
        backend: ``gloo`` (CPU tensors) or ``nccl`` (GPU tensors; host bytes travel over gloo all the same).

    Raises:
        ValueError: unknown backend, or a rank outside the group.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend {backend!r}: supported are gloo and nccl")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} lies outside a group of {size}")
    if size == 1:
        return ParallelState.single()
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size)
    group = dist.group.WORLD
    host_group = group if backend == "gloo" else dist.new_group(backend="gloo")
    return ParallelState(rank=rank, size=size, group=group, host_group=host_group)
