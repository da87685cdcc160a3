"""Training of drafters on text their target writes: data, losses, loop, ranks, ablations (docs/training.md)."""
