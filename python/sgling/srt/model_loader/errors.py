"""The one error of weight loading."""

from __future__ import annotations

from sgling.srt.config.flags import ServerArgsError


class ModelLoadError(ServerArgsError):
    """Weights that cannot be loaded, a refused start; the message names the file or the tensor."""
