"""Fixtures of the runtime's tests."""

from spec.fake_graphs import fake_cuda

__all__ = ["fake_cuda"]
