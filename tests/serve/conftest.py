"""Servers for tests: a tiny random pair, and a model that says what the test wants, each behind a real socket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from model_files import TEMPLATE, config, write_folder
from running import Running
from tiny_pair import CONTEXT, start_tiny


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints: 'target', and 'draft' of its first layer."""
    folder = tmp_path_factory.mktemp("served")
    write_folder(folder / "target", config(context_length=CONTEXT))
    write_folder(folder / "draft", config(num_layers=1, context_length=CONTEXT))
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    return folder


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
