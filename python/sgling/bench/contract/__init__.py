"""Acceptance contracts: what a deployment promises per scenario and concurrency, measured and judged."""
