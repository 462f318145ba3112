"""Quantising: a checkpoint into a format, to nearest or by what activations are like."""
