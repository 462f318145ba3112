"""bitdraft finds, tunes and serves the fastest lossless low-bit draft for a language model."""

__version__ = "0.1.0"
