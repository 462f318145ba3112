"""Measuring: what a draft in each precision is worth for a target, here and for this traffic."""
