"""Where the rows of a forward live: KV slots, positions, state slots."""

from sgling_kernel.cache_locs.reference import gather_state_slots, window_locs

__all__ = ["gather_state_slots", "window_locs"]
