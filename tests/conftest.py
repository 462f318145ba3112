"""Model files that tests of several folders read, and how torch runs in tests."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from bitdraft.models import hub

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

torch.set_num_threads(1)
"""Most tensors here are tiny, and two threads that wait for each other on a busy machine take three times as long."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a .gguf file; fetched (93 MB) where the cache has none."""
    return hub.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def qwen_half() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct as a .gguf file (491 MB): for tests marked `models`."""
    return hub.resolve("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def qwen_big() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct as a .gguf file (1.1 GB): for tests marked `models`."""
    return hub.resolve("qwen2.5-coder-1.5b")
