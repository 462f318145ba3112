"""Exact speculative decoding: distributions, the rules of verification, draft lengths and random streams."""
