"""The one error of weight loading."""

from __future__ import annotations


class ModelLoadError(RuntimeError):
    """Weights that cannot be loaded; the message names the file or the tensor."""
