"""`bitdraft measure` and `report` as a user runs them, on a tiny random pair."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import config, write_folder
from typer.testing import CliRunner

from bitdraft import cli
from bitdraft.errors import NumericsError
from bitdraft.measure import run as run_module
from bitdraft.measure.config import MeasureConfig
from bitdraft.measure.trace import Score, Text, Trace
from bitdraft.models.decoder import Decoder
from bitdraft.types import SamplingParams

PROMPTS = [{"prompt": text} for text in ("abc", "hello world", "a b c d e f", "one two")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random models with one vocabulary, and a workload."""
    folder = tmp_path_factory.mktemp("pair")
    write_folder(folder / "target", config())
    write_folder(folder / "draft", config(num_layers=1))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    return folder


def asked(pair: Path, **changes: Any) -> MeasureConfig:
    options: dict[str, Any] = {
        "target": str(pair / "target"),
        "draft": str(pair / "draft"),
        "target_format": "bf16",
        "formats": ("bf16", "w8a8"),
        "workloads": (str(pair / "prompts.jsonl"),),
        "prompts": 4,
        "draft_lengths": (1, 2, 3),
        "sampling": SamplingParams(temperature=0, max_tokens=8, ignore_eos=False),
        "timings": 2,
        "confirm_prompts": 2,
        "rounds": 1,
    }
    return MeasureConfig(**{**options, **changes})


def measure(folder: Path, wanted: MeasureConfig, *, resume: bool = False, progress: Any = None) -> None:
    # Without kept weights, so that every run reports the same progress, whichever ran before.
    said = progress or (lambda *_: None)
    run_module.run(wanted, folder, resume=resume, use_cache=False, command="bitdraft measure", progress=said)


def facts(folder: Path) -> tuple[Any, ...]:
    """What of a trace does not depend on time."""
    trace = Trace.load(folder)
    texts = {key: (text.ids, text.finish) for key, text in trace.texts.items()}
    scores = {key: (score.overlap, score.ratio, score.kl_pq, score.top1) for key, score in trace.scores.items()}
    runs = {(c.format, c.k, c.workload, c.index, c.round, c.tokens, c.accepted) for c in trace.confirmations}
    return texts, scores, {format for format, *_ in runs}


def test_a_measurement_ends_in_four_files_and_a_matrix(pair: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli.app,
        f"measure --target {pair}/target --draft {pair}/draft --formats bf16,w8a8 --workload {pair}/prompts.jsonl "
        f"--prompts 4 --max-tokens 8 --k 1..3 --rounds 1 --confirm-prompts 2 -o {tmp_path}/out".split(),
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    for word in ("none", "bf16", "w8a8", "written"):
        assert word in result.stdout
    assert {"report.html", "report.md", "report.json", "plan.json"} <= {p.name for p in (tmp_path / "out").iterdir()}
    again = CliRunner().invoke(cli.app, ["report", str(tmp_path / "out"), "--json"], catch_exceptions=False)
    figures = json.loads(again.stdout)
    cell = figures["formats"]["w8a8"]["prompts.jsonl"]
    for name in ("conditional_acceptance", "accepted_per_drafted", "kl", "tokens_per_step", "speedup"):
        assert {"value", "low", "high"} <= set(cell[name])


def test_a_draft_that_is_the_target_is_always_right(pair: Path, tmp_path: Path) -> None:
    """In the same format: overlap 1, KL 0, every draft accepted, the greedy ids those of the plain run."""
    measure(tmp_path / "out", asked(pair, draft=str(pair / "target"), formats=("bf16",)))
    trace = Trace.load(tmp_path / "out")
    for score in trace.scores.values():
        assert min(score.overlap_t1) == pytest.approx(1, abs=1e-5)
        assert max(score.kl_pq) < 1e-6
        assert set(score.overlap) == set(score.ratio) == {1.0}
    speculative = [c for c in trace.confirmations if c.k]
    assert speculative
    for run in speculative:
        assert run.accepted == run.proposed
        assert run.same_ids


class _Stop:
    """Interrupts at the n-th report of progress, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "out"
    measure(folder, asked(pair))
    return folder


@pytest.mark.parametrize("after", [0, 3, 6, 9, 15, 22, 30, 36])
def test_an_interrupted_run_goes_on_to_the_same_figures(pair: Path, whole: Path, tmp_path: Path, after: int) -> None:
    wanted = asked(pair)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "out", wanted, progress=_Stop(after))
    kept = Trace.load(tmp_path / "out") if (tmp_path / "out" / "run.json").exists() else None
    measure(tmp_path / "out", wanted, resume=True)
    assert facts(tmp_path / "out") == facts(whole)
    if kept:
        after_all = Trace.load(tmp_path / "out")
        assert all(after_all.texts[key] == text for key, text in kept.texts.items()), "what was done is done once"


def test_a_finished_run_is_not_measured_again(pair: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.read_bytes() for p in whole.iterdir() if p.is_file()}
    measure(whole, asked(pair), resume=True)
    assert before == {p.name: p.read_bytes() for p in whole.iterdir() if p.is_file()}


def test_texts_are_the_target_and_scores_belong_to_them(whole: Path) -> None:
    trace = Trace.load(whole)
    assert len(trace.texts) == 4
    assert len(trace.scores) == 8
    for score in trace.scores.values():
        assert isinstance(score, Score)
        text = trace.texts[score.workload, score.index]
        assert isinstance(text, Text)
        assert len(score.overlap) == len(text.ids) <= 8


CASES = [
    ("--formats w5a5", "no format 'w5a5'"),
    ("--formats w8a8-awq", "has no groups"),
    ("--formats w4a16-g128", "do not divide into groups of 128"),
    ("--workload poems", "poems"),
    ("--prompts 5", "holds 4 prompts"),
    ("--max-tokens 1", "max_tokens is 1"),
    ("--max-tokens 100000", "the context is"),
    ("--k 0..3", "--k is '0..3'"),
    ("--k many", "--k is 'many'"),
    ("--temperature -1", "temperature is -1"),
    ("--top-p 0", "top_p is 0"),
    ("--target nowhere/nothing", "nowhere/nothing"),
    ("--draft no-such-model", "no-such-model"),
    ("--formats bf16,bf16", "each once"),
    ("-o /proc/nothing", "/proc/nothing"),
]


@pytest.mark.parametrize(("options", "message"), CASES, ids=[c[0] for c in CASES])
def test_what_cannot_be_used_is_one_message(
    pair: Path, tmp_path: Path, options: str, message: str, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Exit code 2, no traceback, and nothing of an output folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    defaults = {
        "--target": f"{pair}/target",
        "--draft": f"{pair}/draft",
        "--workload": f"{pair}/prompts.jsonl",
        "--prompts": "4",
        "--max-tokens": "8",
        "-o": f"{tmp_path}/out",
    }
    name, _, value = options.partition(" ")
    arguments = [part for pair_ in {**defaults, name: value}.items() for part in pair_]
    monkeypatch.setattr("sys.argv", ["bitdraft", "measure", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capfd.readouterr()
    assert stopped.value.code == 2
    assert message in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert not (tmp_path / "out").exists()


def test_nan_in_the_logits_is_said(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x: real(self, x) * torch.nan)
    with pytest.raises(NumericsError, match=r"logits are NaN in row 0.*try it in bf16"):
        measure(tmp_path / "out", asked(pair))


def test_a_loss_is_explained_beside_the_trace_and_in_the_reports(pair: Path, tmp_path: Path) -> None:
    command = (
        f"measure --target {pair}/target --draft {pair}/draft --formats bf16,w4a8 --workload {pair}/prompts.jsonl "
        f"--prompts 3 --max-tokens 6 --k 1 --confirm 0 --no-cache --kv int8 --attribute w4a8 -o {tmp_path}/out"
    )
    result = CliRunner().invoke(cli.app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0
    assert "## Where w4a8 loses acceptance" in (tmp_path / "out" / "report.md").read_text()
    found = json.loads((tmp_path / "out" / "report.json").read_text())["attribution"]["w4a8"]
    assert set(found["layers"]) == {"layer 0"}
    assert "head" in found["classes"]
    parts = [found["inputs"], found["kv"], found["unexplained"], *found["classes"].values()]
    assert sum(part["value"] for part in parts) == pytest.approx(found["whole"]["value"], abs=1e-12)
    lines = (tmp_path / "out" / "attribution.jsonl").read_text()
    again = CliRunner().invoke(cli.app, [*command.split(), "--resume"], catch_exceptions=False)
    assert again.exit_code == 0
    assert (tmp_path / "out" / "attribution.jsonl").read_text() == lines
