"""Token embedding together with the norms that read it: one node each on a GPU."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.embedding import reference

__all__ = ["embed_norm", "embed_pair"]


def embed_norm(ids: Tensor, table: Tensor, norm: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
    """(embedded rows, their norm); see reference.embed_norm."""
    if dispatch.use_triton(table):
        from sgling_kernel.embedding import kernel

        return kernel.embed_norm(ids, table, norm)
    return reference.embed_norm(ids, table, norm)


def embed_pair(
    ids: Tensor,
    table: Tensor,
    norm: tuple[Tensor, float],
    hidden: Tensor,
    hidden_norm: tuple[Tensor, float],
    rows: Tensor | None = None,
) -> Tensor:
    """Normalised embeddings and hidden states side by side; see reference.embed_pair."""
    if dispatch.use_triton(table):
        from sgling_kernel.embedding import kernel

        return kernel.embed_pair(ids, table, norm, hidden, hidden_norm, rows)
    return reference.embed_pair(ids, table, norm, hidden, hidden_norm, rows)
