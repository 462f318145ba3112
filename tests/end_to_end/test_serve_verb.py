"""`bitdraft serve` that cannot start."""

from pathlib import Path

import pytest
from command_line import Run
from model_files import config, write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unserved") / "model"
    write_folder(folder, config())
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft", "no/such-folder/at-all"), "no/such-folder/at-all"),
        (("--draft-format", "w1a1"), "no format 'w1a1'"),
        (("--draft-folder", "."), "Expected --draft auto"),
        (("--draft", "auto", "--draft-folder", "nowhere"), "--draft-folder nowhere is no folder"),
        (("--kv-memory", "1KB"), "--kv-memory"),
        (("--kv-memory", "lots"), "a size of 'lots'"),
        (("--k", "many"), "--k is 'many'"),
        (("--generation-config", "some"), "Expected auto or none"),
        (("--host", "203.0.113.7"), "cannot be listened on"),
        (("--plan", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_served_is_one_message_and_code_two_u56(
    run: Run, model: Path, options: tuple, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = run("serve", "--target", model, "--port", 0, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
