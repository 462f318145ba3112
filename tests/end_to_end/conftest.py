"""The command line as a user runs it, in this process."""

from collections.abc import Iterator

import pytest
from command_line import Run

from bitdraft import cli
from bitdraft.ops import native


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Called with arguments, and variables of the environment by name; those that choose kernels are read anew."""

    def call(*arguments: object, **environment: str) -> tuple[int, str, str]:
        for name in ("BITDRAFT_ISA", "BITDRAFT_THREADS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"COLUMNS": "160", **environment}.items():
            monkeypatch.setenv(name, value)
        native.default.cache_clear()
        monkeypatch.setattr("sys.argv", ["bitdraft", *map(str, arguments)])
        code: str | int | None = 0
        try:
            cli.main()
        except SystemExit as stopped:
            code = stopped.code
        said = capfd.readouterr()
        return int(code or 0), said.out, " ".join(said.err.split())

    yield call
    native.default.cache_clear()
