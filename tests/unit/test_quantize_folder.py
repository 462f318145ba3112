"""Quantising into a folder: what is written, what an interruption leaves, and what is refused."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import config, write_folder
from safetensors.torch import load_file, save_file

from bitdraft import cli
from bitdraft.errors import FormatError, ModelFileError, UsageError
from bitdraft.formats import Recipe
from bitdraft.measure.workload import conversations, plain_text
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.export import FolderWriter
from bitdraft.quantize import command
from bitdraft.quantize.command import QuantizeReport, quantize_folder
from bitdraft.quantize.load import Source, open_source
from bitdraft.quantize.pipeline import quantize
from bitdraft.quantize.scripts import MOST_APART, apart, kinds, language_warning

TEXTS = [f"hello world {i} " * 6 for i in range(30)]


@pytest.fixture(name="source")
def opened(tmp_path: Path) -> Source:
    return open_source(str(write_folder(tmp_path / "model", config("qwen2", num_layers=3))))


def encoded(source: Source) -> list[list[int]]:
    return [source.tokenizer.encode(text) for text in TEXTS]


def made(source: Source, folder: Path, recipe: str = "w4a16-awq", **changes: Any) -> QuantizeReport:
    given: dict[str, Any] = {"seed": 0, "calibration": encoded(source)} | changes
    return quantize_folder(source, Recipe.parse(recipe), folder, **given)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a folder; the order of a file's header is not ours to choose."""
    files = (load_file(path) for path in sorted(folder.glob("*.safetensors")))
    return {name: tensor.view(torch.uint8).numpy().tobytes() for file in files for name, tensor in file.items()}


@pytest.mark.parametrize("recipe", ["w4a16", "w4a16-asym-clip", "w4a16-gptq"])
def test_a_folder_holds_what_quantize_makes(source: Source, recipe: str, tmp_path: Path) -> None:
    calls: list[tuple[int, int | None, str]] = []
    report = made(source, tmp_path / "out", recipe, progress=lambda *call: calls.append(call))
    rng = np.random.default_rng(0)
    weights = quantize(source.checkpoint, Recipe.parse(recipe), rng=rng, calibration=encoded(source))
    written = open_checkpoint(tmp_path / "out")
    for name, packed in weights.packed.items():
        if ".layers." in name:
            again = written.packed(f"{name}.weight")
            assert torch.equal(again.codes, packed.codes), name
            assert again.format == packed.format
    for name, tensor in weights.tensors.items():
        assert torch.equal(written.tensor(name), tensor)
    assert calls[-1] == (4, 4, f"quantising to {Recipe.parse(recipe).name}")
    assert not (tmp_path / "out.partial").exists()
    assert report.nbytes == weights.nbytes
    assert report.bits_per_weight == pytest.approx(Recipe.parse(recipe).format.bits_per_weight)
    assert report.method == Recipe.parse(recipe).method
    assert report.measured == ("outputs" if recipe.endswith("gptq") else "weights")
    assert all(0.005 < error < 0.2 for error in report.errors.values())
    assert len(report.errors) == 7


@pytest.mark.parametrize("recipe", ["w4a16-clip", "w4a16-awq"])
@pytest.mark.parametrize("where", ["write_layer", "finish"])
def test_a_full_disk_leaves_what_resuming_makes_whole(
    source: Source, recipe: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = made(source, tmp_path / "whole", recipe)
    original = FolderWriter._save

    def full(self: FolderWriter, name: str, *rest: Any) -> None:
        if ("00003-of" in name) if where == "write_layer" else ("00004-of" in name):
            raise UsageError("the disk is full; go on with --resume")
        original(self, name, *rest)

    monkeypatch.setattr(FolderWriter, "_save", full)
    with pytest.raises(UsageError, match="--resume"):
        made(source, tmp_path / "out", recipe)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=r"what an interrupted run left\. Go on with it by --resume"):
        made(source, tmp_path / "out", recipe)
    done: list[int] = []
    monkeypatch.setattr(
        FolderWriter,
        "write_layer",
        lambda self, i, *rest, write=FolderWriter.write_layer: (done.append(i), write(self, i, *rest)),
    )
    report = made(source, tmp_path / "out", recipe, resume=True)
    assert done == ([2] if where == "write_layer" else [])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert report.errors == expected.errors
    assert report.nbytes == expected.nbytes


def test_a_full_disk_while_noting_says_so(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "write_json", full)
    with pytest.raises(UsageError, match=r"out\.partial: cannot be written \(.*No space left.*go on with --resume"):
        made(source, tmp_path / "out", "w4a16")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed 0, not 1"),
        ({"tokens": 700}, "tokens 2048, not 700"),
        ({"calibration": [[1, 2] * 300]}, "calibration"),
        ({"recipe": "w4a16-gptq"}, "recipe 'w4a16-awq', not 'w4a16-gptq'"),
    ],
)
def test_resuming_otherwise_than_begun_is_refused(
    source: Source, changes: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FolderWriter, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(source, tmp_path / "out")
    with pytest.raises(UsageError, match=f"was begun with {named}"):
        made(source, tmp_path / "out", resume=True, **changes)


def test_what_cannot_be_done_leaves_no_folder(source: Source, tmp_path: Path) -> None:
    for recipe, error, changes in (
        ("w4a16-g64", FormatError, {}),
        ("w4a16-awq", UsageError, {"calibration": []}),
        ("w4a16-gptq", UsageError, {"calibration": ["short"]}),
        ("w4a16-gptq", UsageError, {"tokens": 10}),
    ):
        with pytest.raises(error):
            made(source, tmp_path / "out", recipe, **changes)
    assert not list(tmp_path.glob("out*"))


def test_a_finished_folder_is_not_written_over(source: Source, tmp_path: Path) -> None:
    made(source, tmp_path / "out", "w4a16")
    before = contents(tmp_path / "out")
    with pytest.raises(UsageError, match="is there already"):
        made(source, tmp_path / "out", "w4a16", resume=True)
    assert contents(tmp_path / "out") == before


def test_a_weight_that_is_not_a_number_names_its_layer_and_keeps_those_before(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", config(num_layers=2))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds 1 values"):
        made(open_source(str(folder)), tmp_path / "out", "w4a16")
    assert not (tmp_path / "out").exists()


def test_the_verb_prints_its_report(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["quantize", str(source.path), "--format", "w4a16", "--method", "awq", "--calibration", str(texts)]
    monkeypatch.setattr(
        "sys.argv", ["bitdraft", *words, "-o", str(tmp_path / "out"), "--workload", "chat-zh", "--json"]
    )
    with pytest.raises(SystemExit) as end:
        raise SystemExit(cli.main())
    assert not end.value.code
    printed = capfd.readouterr()
    assert json.loads(printed.out)["recipe"] == "w4a16-awq"
    assert "the calibration set is" in printed.err.replace("\n", " ")
    assert open_source(str(tmp_path / "out")).checkpoint.config == source.checkpoint.config


def test_too_few_texts_are_refused_before_a_budget_is_worked_on(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "hello world"}\n')
    words = ["quantize", str(source.path), "--budget", "4.25bits", "--target", str(source.path), "--method", "awq"]
    monkeypatch.setattr("bitdraft.cli.models.choose_formats", lambda *_: pytest.fail("the budget was worked on"))
    monkeypatch.setattr("sys.argv", ["bitdraft", *words, "--calibration", str(texts), "-o", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "more: with fewer the statistics are chance" in capfd.readouterr().err.replace("\n", " ")


# --- languages ---


def test_kinds_of_characters_are_counted() -> None:
    assert kinds(["ab 1!", "你好"]) == {"latin": 2 / 6, "digits": 1 / 6, "symbols": 1 / 6, "cjk": 2 / 6}
    assert kinds(["Привет", "ⴰⴱ"]) == {"cyrillic": 6 / 8, "other letters": 2 / 8}
    assert kinds([]) == {}


def test_another_language_is_noticed_and_the_same_is_not() -> None:
    english, chinese, code = (
        [plain_text(body) for body in conversations(name, 8)] for name in ("chat-en", "chat-zh", "code")
    )
    assert apart(english, english) == 0
    assert language_warning(english[:4], english[4:]) is None
    assert language_warning(english, code) is None
    warning = language_warning(english, chinese)
    assert warning is not None
    assert "latin" in warning.partition("the workload")[0]
    assert "CJK" in warning.partition("the workload")[2]
    assert apart(english, chinese) > MOST_APART
