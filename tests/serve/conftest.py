"""Servers for tests: a tiny random pair, and a model that says what the test wants, each behind a real socket."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from model_files import TEMPLATE, config, write_folder
from running import Running, start

from bitdraft.serve.start import ServeConfig, load_service, open_and_plan

CONTEXT = 512


def serve_config(target: Path, draft: str | None, **changes: object) -> ServeConfig:
    """What the tests serve unless they say otherwise."""
    values: dict[str, object] = {
        "target": str(target),
        "draft": draft,
        "target_format": "auto",
        "draft_format": "auto",
        "kv": None,
        "draft_kv": None,
        "draft_length": 3,
        "confidence": 0.0,
        "max_batch": 4,
        "max_model_len": CONTEXT,
        "kv_memory": 8 << 20,
        "prefix_cache": True,
        "generation_config": True,
        "names": ("tiny",),
        "lenient": False,
        "api_key": None,
        "origins": (),
        "max_queue": 64,
        "max_body": 1 << 20,
        "timeout": 60.0,
        "drain": 2.0,
        "vllm_metrics": True,
    }
    return ServeConfig(**values | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints: 'target', and 'draft' of its first layer."""
    folder = tmp_path_factory.mktemp("served")
    write_folder(folder / "target", config(context_length=CONTEXT))
    write_folder(folder / "draft", config(num_layers=1, context_length=CONTEXT))
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def start_tiny(folders: Path, draft: str | None, calibration: Sequence[str] = (), **changes: object) -> Running:
    """A running server of the tiny pair."""
    wanted = serve_config(folders / "target", draft, **changes)
    opened, plan = open_and_plan(wanted)
    return start(load_service(wanted, opened, plan, calibration))


@pytest.fixture(scope="session")
def drafted(folders: Path) -> Iterator[Running]:
    """The tiny target with the tiny draft."""
    with start_tiny(folders, str(folders / "draft")) as running:
        yield running


@pytest.fixture(scope="session")
def plain(folders: Path) -> Iterator[Running]:
    """The tiny target alone."""
    with start_tiny(folders, None) as running:
        yield running
