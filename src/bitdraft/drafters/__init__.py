"""Drafters: another model, the text itself, or a script."""
