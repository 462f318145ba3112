"""`bitdraft generate` and the small verbs as a user runs them, on a tiny random pair."""

import json
from pathlib import Path

import pytest
from command_line import Run
from model_files import config, write_folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    write_folder(folder / "target", config())
    write_folder(folder / "draft", config(num_layers=1))
    return folder


def generate(run: Run, pair: Path, *options: object) -> dict:
    code, out, err = run("generate", "abc abc abc", "--target", pair / "target", "--raw", "--json", *options)
    assert code == 0, err
    assert len(out.splitlines()) == 1, "one object on standard output, and nothing else"
    return json.loads(out)


def test_greedy_text_is_the_same_with_every_draft(run: Run, pair: Path) -> None:
    """Both models are tiny: FP32 sums of 32 terms do not tie here."""
    plain = generate(run, pair, "--max-tokens", 24)
    for options in (
        ("--draft", pair / "draft"),
        ("--draft", pair / "draft", "--draft-format", "w4a16", "--k", 7),
        ("--draft", pair / "draft", "--confidence", 0.5),
        ("--draft", pair / "target", "--k", 2),
        ("--draft", "ngram"),
    ):
        drafted = generate(run, pair, "--max-tokens", 24, *options)
        assert [t for t, _ in drafted["output"]] == [t for t, _ in plain["output"]]
        assert drafted["text"] == plain["text"]
    assert plain["accepted_per_drafted"] is None
    assert set(plain["origins"]) == {"draft", "corrected", "free"}
    assert plain["origins"]["free"] == plain["tokens_per_step"] * plain["steps"] == len(plain["output"])


def test_a_draft_that_is_the_target_is_accepted_whole(run: Run, pair: Path) -> None:
    figures = generate(run, pair, "--draft", pair / "target", "--k", 3, "--max-tokens", 24)
    assert figures["accepted_per_drafted"] == figures["conditional_acceptance"] == 1
    assert figures["origins"]["corrected"] == 0


def test_the_same_seed_gives_the_same_sample_and_another_seed_another(run: Run, pair: Path) -> None:
    sampled = ("--temperature", 1.5, "--max-tokens", 24, "--draft", pair / "draft", "--seed")
    first, again, other = (generate(run, pair, *sampled, seed)["output"] for seed in (1, 1, 2))
    assert first == again != other


def test_text_in_colours_has_a_legend_in_words(run: Run, pair: Path) -> None:
    code, out, _ = run(
        "generate", "abc", "--target", pair / "target", "--draft", pair / "draft", "--raw", "--max-tokens", 12
    )
    assert code == 0
    for word in ("draft:", "corrected:", "free:", "tokens per step", "accepted/drafted"):
        assert word in out


def test_the_context_ends_the_output(run: Run, pair: Path) -> None:
    """What the prompt leaves of 24 tokens is written, whatever --max-tokens says."""
    plain = generate(run, pair, "--context", 24, "--max-tokens", 100)
    drafted = generate(run, pair, "--context", 24, "--max-tokens", 100, "--draft", pair / "draft", "--k", 8)
    assert len(plain["output"]) == len(drafted["output"]) < 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target-format", "w1a1"), "no format 'w1a1'"),
        (("--temperature", "-1"), "temperature is -1"),
        (("--context", 2), "the context holds 2"),
        (("--draft", "no/such-folder/at-all"), "no/such-folder/at-all"),
        (("--plan", "nowhere.json"), "nowhere.json cannot be read"),
        (("--stop", ""), "strings that are not empty"),
    ],
)
def test_what_cannot_be_used_is_one_message(
    run: Run, pair: Path, options: tuple, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = run("generate", "abc abc", "--target", pair / "target", "--raw", *options)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_models_of_two_vocabularies_are_refused_with_the_ids(run: Run, pair: Path, smollm2: Path) -> None:
    code, _, err = run("generate", "abc", "--target", pair / "target", "--draft", smollm2, "--raw")
    assert code == 2
    assert "266 of 269 token ids mean one thing to" in err
    assert "quantising" not in err, "refused before any work"


@pytest.mark.parametrize("cut", [0, 3, 100, 5000])
def test_a_cut_file_is_named(run: Run, pair: Path, tmp_path: Path, smollm2: Path, cut: int) -> None:
    damaged = tmp_path / "cut.gguf"
    with smollm2.open("rb") as whole:
        damaged.write_bytes(whole.read(cut))
    code, _, err = run("generate", "abc", "--target", damaged, "--raw")
    assert code == 2
    assert "cut.gguf" in err


def test_unknown_options_and_verbs_are_two(run: Run) -> None:
    assert run("generate", "--nope")[0] == 2
    assert run("nonsense")[0] == 2
    assert run("measure")[0] == 2


def test_small_verbs(run: Run) -> None:
    code, out, _ = run("formats", "--json")
    assert code == 0
    assert {"f32", "bf16", "w4a16"} <= {row["format"] for row in json.loads(out)["formats"]}
    code, out, _ = run("pull", "--json")
    assert code == 0
    assert {"smollm2-135m", "qwen2.5-coder-1.5b"} <= {row["name"] for row in json.loads(out)["models"]}
    assert run("--version")[1].strip().count(".") == 2
    code, _, err = run("pull", "no-such-model-at-all")
    assert code == 2
    assert "smollm2-135m" in err
