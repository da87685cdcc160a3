"""Seeded generator of the embedded model's training data: plain Python, ours, one module per scenario."""
