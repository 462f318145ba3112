"""Models: files, tokenizers, one decoder and its paged cache."""
