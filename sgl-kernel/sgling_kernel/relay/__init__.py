"""Hand-over of cross-step values through per-request buffers."""

from sgling_kernel.relay.reference import gather_relay, poison_relay, scatter_relay

__all__ = ["gather_relay", "poison_relay", "scatter_relay"]
