"""SGLing: serving for batch 1 and the lowest possible time per output token.

``sgling.Engine`` is the library entry; it is loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str):
    if name == "Engine":
        from sgling.srt.entrypoints.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
