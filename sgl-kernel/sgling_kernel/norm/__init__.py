"""RMS norms of the trunk and of KDA's output."""

from sgling_kernel.norm.reference import fused_add_rms_norm, gated_rms_norm, rms_norm

__all__ = ["fused_add_rms_norm", "gated_rms_norm", "rms_norm"]
