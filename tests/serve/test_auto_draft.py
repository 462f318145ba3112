"""`--draft auto` (users-pain U93): of what lies on the machine, the model that can draft; and why not the others."""

import json
import re
from pathlib import Path

import httpx2 as httpx
import pytest
from model_files import config, write_folder, write_gguf
from running import start
from tiny_pair import serve_config

from bitdraft.errors import UsageError
from bitdraft.quantize.load import open_source
from bitdraft.serve.auto_draft import choose_draft
from bitdraft.serve.start import load_service, open_and_plan


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two models of its vocabulary that are small enough, one that is not, another family, and a file."""
    folder = tmp_path_factory.mktemp("models")
    write_folder(folder / "target", config(num_layers=8, context_length=512))
    write_folder(folder / "small", config(num_layers=1, context_length=512))
    write_gguf(folder / "smaller.gguf", config(num_layers=1, mlp_size=32, context_length=512))
    write_folder(folder / "big", config(num_layers=6, context_length=512))
    other = write_folder(folder / "other", config(num_layers=1, mlp_size=8))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("no model")
    return folder


def test_the_smallest_that_fits_is_chosen_and_the_others_are_named(models: Path, tmp_path: Path) -> None:
    chosen = choose_draft(open_source(str(models / "target")), [models], cache=tmp_path)
    assert chosen.draft == str(models / "smaller.gguf")
    reasons = {Path(name).name: reason for name, reason in chosen.refused}
    assert set(reasons) == {"big", "other", "broken.gguf"}
    assert "of the target's weights" in reasons["big"]
    assert "token ids mean one thing to the target" in reasons["other"]


def test_n_grams_draft_where_nothing_fits(models: Path, tmp_path: Path) -> None:
    target = open_source(str(models / "target"))
    chosen = choose_draft(target, [models / "big"], cache=tmp_path)
    assert (chosen.draft, len(chosen.refused)) == ("ngram", 1)
    assert "n-grams" in chosen.why
    assert choose_draft(target, [], cache=tmp_path).draft == "ngram"
    with pytest.raises(UsageError, match="is no folder"):
        choose_draft(target, [models / "notes.txt"], cache=tmp_path)


def test_a_server_says_what_drafts_and_why(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BITDRAFT_CACHE", str(tmp_path))
    wanted = serve_config(models / "target", "auto", draft_folders=(models,))
    opened, plan = open_and_plan(wanted)
    with caplog.at_level("INFO"), start(load_service(wanted, opened, plan, [])) as server:
        draft = httpx.get(f"{server.url}/info").json()["draft"]
        assert draft["path"] == str(models / "smaller.gguf")
        assert "smaller.gguf" in draft["chosen"]
        assert str(models / "other") in draft["not_chosen"]
        assert server.complete("hello")["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert "draft chosen" in caplog.messages


@pytest.mark.parametrize(("drafts", "k"), [(("small",), None), (("small",), 3), ((), None)])
def test_what_to_expect_of_it_is_said_u93(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: tuple[str, ...], k: int | None
) -> None:
    """A model or n-grams, tried on texts; the speedup where the length follows costs, which are known then."""
    monkeypatch.setenv("BITDRAFT_CACHE", str(tmp_path))
    folders = tuple(models / name for name in drafts)
    wanted = serve_config(models / "target", "auto", draft_folders=folders, draft_length=k)
    opened, plan = open_and_plan(wanted)
    service = load_service(wanted, opened, plan, ["hello world, hello world, hello world. " * 4] * 4)
    said = service.info()["draft"]["chosen"]
    assert re.search(r"On shipped texts \d+% of its tokens were accepted\.", said) or not drafts
    assert bool(re.search(r"Expected speedup: \d\.\d\d×, with K = \d\.|not expected to pay: K = 0\.", said)) == (
        k is None
    )
