"""The docs, held to the code: every command runs or parses, every option and name is described, every link leads on."""

import ast
import dataclasses
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import typer
from safetensors.torch import save_file

from bitdraft import cli, errors, ops
from bitdraft.decoding.streams import Streams
from bitdraft.engine import engine
from bitdraft.formats import FORMATS, KV_FORMATS, Recipe, get_format
from bitdraft.measure import trace
from bitdraft.measure.workload import WORKLOADS, load_workload
from bitdraft.models.hf_config import config_from_hf
from bitdraft.models.registry import KNOWN_MODELS

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
}


def verbs(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, command) of everything that can be run, such as 'measure' and 'bench step'."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


VERBS = dict(verbs(typer.main.get_command(cli.app)))

NOT_HERE = {
    "README.md": ["bitdraft serve", "bitdraft generate 'Write a haiku about rounding.'"],
    "docs/reference/cli.md": [
        "bitdraft measure --target qwen2.5-coder-1.5b",
        "bitdraft generate 'List the days of the week twice.'",
        "bitdraft quantize smollm2-135m",
        "bitdraft bench kernels",
        "bitdraft bench step smollm2-135m",
        "bitdraft bench serve",
        "bitdraft serve",
        "bitdraft pull smollm2-135m",
    ],
    "docs/how-to/serve.md": ["bitdraft serve"],
    "docs/how-to/evaluate-a-server.md": ["bitdraft serve"],
    "docs/how-to/measure-a-server.md": ["bitdraft bench serve"] * 5,
    "docs/how-to/use-your-machine-well.md": ["bitdraft bench kernels"],
    "docs/tutorial/first-measurement.md": [
        "bitdraft pull qwen2.5-coder-1.5b qwen2.5-coder-0.5b",
        "bitdraft measure --target qwen2.5-coder-1.5b",
        "bitdraft generate 'Write a Python function",
        "bitdraft generate 'Repeat this list three times",
        "bitdraft generate 'Write a Python function",
    ],
}
"""Beginnings of the commands that need large model files or half a minute, by page and in order: parsed, not run. All
others are run."""

NOT_RUN = re.compile(r"make [a-z-]+|lm_eval run .*|source \.venv/bin/activate|pip install .*")
"""Commands of other programs that docs may show."""


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, contents) of every fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]


def shown_commands(text: str) -> list[str]:
    """The commands of a page in order: lines after '$ ' in console blocks, all lines of bash blocks."""
    commands = []
    for language, body in fenced_blocks(text):
        body = body.replace("\\\n", " ")
        if language == "console":
            commands += [line[2:] for line in body.splitlines() if line.startswith("$ ")]
        elif language == "bash":
            commands += [line for line in body.splitlines() if line.strip() and not line.startswith("#")]
    return commands


def arguments(command: str) -> list[str] | None:
    """What is handed to bitdraft by a command; None if it is another program's."""
    words = shlex.split(command, comments=True)
    return words[1:] if words and words[0].removeprefix(".venv/bin/") == "bitdraft" else None


def parsed_only(page: str, command: str) -> bool:
    given = arguments(command)
    start = shlex.join(["bitdraft", *given]) if given is not None else ""
    return any(start.startswith(beginning.removesuffix("'")) for beginning in NOT_HERE.get(page, ()))


def parse(given: list[str]) -> tuple[str, dict[str, object]]:
    """Let the command line parse arguments; returns the verb and its parameters. Raises what it raises."""
    words = 2 if " ".join(given[:2]) in VERBS else 1
    verb = " ".join(given[:words])
    return verb, VERBS[verb].make_context(verb, given[words:]).params


SHOWN = [(page, command) for page, text in PAGES.items() if page != "README.zh.md" for command in shown_commands(text)]
RUN_PAGES = sorted(
    {page for page, command in SHOWN if arguments(command) is not None and not parsed_only(page, command)}
)


# Commands


def test_the_list_of_commands_that_are_not_run_is_true():
    for page, beginnings in NOT_HERE.items():
        found = [command for shown_on, command in SHOWN if shown_on == page and parsed_only(page, command)]
        assert len(found) == len(beginnings), f"{page}: {found}"


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_every_command_is_one_that_is_known(page, command):
    if arguments(command) is None:
        assert NOT_RUN.fullmatch(command) or command.startswith("printf ")
    if command.startswith("make "):
        assert re.search(rf"^{command[5:]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def examples() -> Iterator[tuple[str, str]]:
    """Every bitdraft command that docs, help texts and the Makefile show."""
    yield from ((page, command) for page, command in SHOWN if arguments(command) is not None)
    for verb, command in VERBS.items():
        yield f"{verb} --help", (command.epilog or "").removeprefix("Example: ")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ").replace("$(BIN)", ".venv/bin")
    yield from (("Makefile", line.strip()) for line in makefile.splitlines() if ".venv/bin/bitdraft " in line)


@pytest.mark.parametrize(("where", "command"), list(examples()))
def test_every_shown_command_parses_and_names_things_that_exist(where, command):
    verb, given = parse(arguments(command) or [])
    for option in ("formats", "target_format", "draft_format", "format"):
        for name in str(given.get(option) or "").split(","):
            if name and name != "auto":
                Recipe.parse(name)
    for name in str(given.get("workload") or "").split(","):
        if name and not name.endswith(".jsonl"):
            load_workload(name, given.get("prompts"))
    if verb == "measure":
        assert cli.measure.draft_lengths(given["k"])
    known = {*KNOWN_MODELS, "my-target", "my-draft", "my-draft-w4", "ngram"}
    assert {given[option] for option in ("target", "draft", "model") if given.get(option)} <= known
    assert set(given.get("names") or ()) <= set(KNOWN_MODELS)


@pytest.mark.parametrize(
    "words", ["measure --nonsense", "measure --target a", "bench step a --nonsense", "bench nonsense", "nonsense"]
)
def test_a_command_that_does_not_exist_does_not_parse(words):
    with pytest.raises(Exception, match=r"(?i)no such option|missing parameter|nonsense|bench"):
        parse(words.split())


def tiny_model(folder: Path, layers: int) -> None:
    """A Llama whose tokens are the bytes, with a chat template, as a folder.

    Weights are random, but the same for the same name: a model of fewer layers guesses one of more layers often.
    """
    folder.mkdir()
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (folder / "chat_template.jinja").write_text(template)
    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 32}
    raw = {"model_type": "llama", "vocab_size": 257, "max_position_embeddings": 4096, "eos_token_id": 256, **sizes}
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = {f"{name}.weight": shape for name, shape in config_from_hf(raw, "tiny").linear_shapes().items()}
    shapes["model.embed_tokens.weight"] = (257, 32)
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{i}.{n}_layernorm.weight" for i in range(layers) for n in ("input", "post_attention")]
    save_file(tensors | {name: torch.ones(32) for name in [*norms, "model.norm.weight"]}, folder / "model.safetensors")


def run_bitdraft(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command in this process, as the installed program would."""
    monkeypatch.setattr(sys, "argv", ["bitdraft", *given])
    with pytest.raises(SystemExit) as end:
        sys.exit(cli.main())
    assert not end.value.code, f"bitdraft {shlex.join(given)} ended with code {end.value.code}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a tiny target and a tiny draft; torch runs on one thread, which suits them."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "my-target", layers=2)
    tiny_model(folder / "my-draft", layers=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished_report(models):
    """A small measured run, for pages that show what to do with one."""
    report = models / "my-report"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(models)
        options = "--formats bf16,w4a16 --workload code --prompts 2 --max-tokens 12 --k 1..3 -o my-report"
        run_bitdraft(shlex.split(f"measure --target my-target --draft my-draft {options}"), patch)
    return report


@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_commands_of_a_page_run_one_after_the_other(page, models, finished_report, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in ("my-target", "my-draft"):
        (tmp_path / name).symlink_to(models / name)
    commands = [command for shown_on, command in SHOWN if shown_on == page]
    if not any("-o my-report" in command for command in commands):
        shutil.copytree(finished_report, tmp_path / "my-report")
    for command in commands:
        given = arguments(command)
        if command.startswith("printf "):
            subprocess.run(["bash", "-c", command], check=True)
        elif given is not None and not parsed_only(page, command):
            run_bitdraft(given, monkeypatch)
            assert capfd.readouterr().out.strip(), f"{command} printed nothing"
    for folder in {given[given.index("-o") + 1] for given in map(arguments, commands) if given and "-o" in given}:
        if (tmp_path / folder).is_dir() and not (tmp_path / folder / "config.json").exists():
            written = {path.name for path in (tmp_path / folder).iterdir()}
            assert {"report.html", "report.md", "report.json", "plan.json", "run.json"} <= written


# The command line's page


def section(page: str, heading: str) -> str:
    """The text below a heading of any level, up to the next of the same level."""
    match = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", PAGES[page], re.MULTILINE | re.DOTALL)
    assert match, f"{page} has no section {heading!r}"
    return match[2]


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help_with_an_example(verb):
    command = VERBS[verb]
    assert command.help
    assert (command.epilog or "").startswith(f"Example: bitdraft {verb}")
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{verb} {parameter.name} has no help"


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_option_is_documented_and_no_other(verb):
    text = section("docs/reference/cli.md", f"bitdraft {verb}")
    options = {name for p in VERBS[verb].params for name in p.opts if name.startswith("-")} - {"--help"}
    table = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(--?[\w-]+)`", table)) == options


@pytest.mark.parametrize("verb", list(VERBS))
def test_documented_defaults_are_true(verb):
    parameters = {name: p for p in VERBS[verb].params for name in p.opts}
    for line in section("docs/reference/cli.md", f"bitdraft {verb}").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`(--[\w-]+)`", cells[0])
        if len(cells) == 3 and len(names) == 1:
            parameter = parameters[names[0]]
            default = parameter.default
            shown = "required" if parameter.required else "none" if default in (None, ()) else default
            shown = "off" if shown is False else f"{shown:g}" if isinstance(shown, float) else str(shown)
            assert cells[1].strip("`") == shown, names[0]


def test_every_environment_variable_is_documented_and_no_other():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    text = section("docs/reference/cli.md", "Environment variables")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(re.findall(r"\bBITDRAFT_[A-Z_]+\b", sources))


# Reference pages against the code


def test_formats_page_lists_every_format_with_its_bits():
    listed = PAGES["docs/reference/formats.md"].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([\d.]+|as stored) ", listed, re.MULTILINE))
    bits = {name: get_format(name).bits_per_weight for name in FORMATS}
    assert rows == {name: "as stored" if known is None else f"{known:.2f}" for name, known in bits.items()}


def test_kv_formats_page_and_help_list_every_format_with_its_bits():
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) ", PAGES["docs/reference/kv-formats.md"], re.MULTILINE)
    assert rows == [(n, *(f"{kv.bits_per_number(C):.2f}" for C in (64, 128))) for n, kv in KV_FORMATS.items()]
    for verb in ("generate", "measure", "serve", "bench step"):
        (option,) = (option for option in VERBS[verb].params if option.name == "kv")
        assert re.findall(r"[\w-]+(?=,| or|\. D)|(?<=or )[\w-]+", option.help) == [*KV_FORMATS]


def test_operations_page_lists_everything_public():
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGES["docs/reference/operations.md"], re.MULTILINE))
    assert set(ops.__all__) == listed


def test_errors_page_draws_the_whole_tree():
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, errors.BitdraftError)]
    for kind in kinds:
        bases = [b.__name__ for b in kind.__bases__ if b not in (Exception, errors.BitdraftError)]
        row = re.search(rf"^\| `{kind.__name__}` \| (.*?)\|", PAGES["docs/reference/errors.md"], re.MULTILINE)
        assert row, kind.__name__
        assert re.findall(r"\w+", row[1]) == bases


def test_files_page_describes_every_field_of_a_trace():
    for kind, (name, _) in trace.LINES.items():
        first_cells = re.findall(r"^\|([^|]*)\|", section("docs/reference/files.md", name), re.MULTILINE)
        described = {field for cell in first_cells for field in re.findall(r"`(\w+)`", cell)}
        assert described == {field.name for field in dataclasses.fields(kind)}, name


def test_workload_page_lists_every_workload_with_its_size():
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) ", PAGES["docs/how-to/choose-a-workload.md"], re.MULTILINE)
    assert rows == [(name, text.split()[0]) for name, text in WORKLOADS.items()]


def test_cli_page_lists_every_known_model_with_its_size():
    rows = dict(re.findall(r"^\| `([\w.-]+)` \|.*\| (\d+) MB \|$", PAGES["docs/reference/cli.md"], re.MULTILINE))
    assert rows == {name: f"{model.size / 1e6:.0f}" for name, model in KNOWN_MODELS.items()}


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/explanation/architecture.md"])
def test_the_shown_step_is_the_engine_s_own(page):
    block = next(body for language, body in fenced_blocks(PAGES[page]) if language == "python")
    shown = [ast.unparse(statement) for statement in ast.parse(block).body]
    step = ast.parse("class Engine:\n" + inspect.getsource(engine.Engine.step))
    assignments = sorted((node.lineno, ast.unparse(node)) for node in ast.walk(step) if isinstance(node, ast.Assign))
    assert len(shown) == 7
    assert [line for _, line in assignments if line in shown] == shown


def test_decisions_about_random_numbers_name_the_real_purposes():
    text = PAGES["docs/decisions/0003-random-streams.md"]
    assert "Philox" in inspect.getsource(Streams)
    assert all(purpose in text for purpose in ("DRAFT", "ACCEPT", "NEXT"))


# Links and translations


def anchors(text: str) -> set[str]:
    """The anchors that headings make, as on GitHub."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    outside = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", outside)


@pytest.mark.parametrize("page", list(PAGES))
def test_links_lead_somewhere(page):
    for link in links(PAGES[page]):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page}: {link}"


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), ["README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page not in PAGES:
            continue
        reached.add(page)
        paths = [link.partition("#")[0] for link in links(PAGES[page]) if not link.startswith("http")]
        todo += [str(((ROOT / page).parent / path).resolve().relative_to(ROOT)) for path in paths if path]
    assert set(PAGES) - reached == set()


def test_the_chinese_readme_has_the_same_blocks_links_and_headings():
    english, chinese = PAGES["README.md"], PAGES["README.zh.md"]
    assert list(fenced_blocks(chinese)) == list(fenced_blocks(english))
    swapped = [{"README.zh.md": "README.md"}.get(link, link) for link in links(english)]
    assert sorted(links(chinese)) == sorted(swapped)
    levels = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (english, chinese)]
    assert levels[0] == levels[1]
    assert chinese.count("\n| ") == english.count("\n| ")
