"""How fast is bitdraft beside llama.cpp, OpenVINO GenAI and transformers, on this machine?

bitdraft and a peer run in processes of their own and take turns, A B A B, one measurement each; one peer comes after
the other. A process that waits is stopped. Records are added to benchmarks/results/DATE-machine-peers.jsonl, and the
tables beside it are made anew from all of them. setup_peers.py must have run before; README.md says what is compared
with what.

    .venv/bin/python benchmarks/peers/compare.py decode --models qwen2.5-coder-1.5b --formats w4a8 w8a8 bf16
    .venv/bin/python benchmarks/peers/compare.py speculative --formats w4a8 --draft-format w4a8 --k 3 4 5
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from statistics import median
from typing import Any

from files import environments_folder
from protocol import Job
from summary import markdown
from systems import STEPS, System, peers_of
from worker import Worker, WorkerError

from bitdraft.measure.machine import this_machine
from bitdraft.measure.workload import load_workload
from bitdraft.quantize.load import open_source

QUESTIONS = ("decode", "step", "prefill", "speculative")
RESULTS = Path(__file__).parents[1] / "results"
WARM_UP_TOKENS = 8
LONGEST_BLOCK = 16
"""Room in a cache for drafted tokens past the end of an output."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Texts:
    """Token ids to measure on, by the model's own tokenizer.

    Attributes:
        prompts: HumanEval prompts as raw completions. long: all of HumanEval, one after the other.
    """

    prompts: list[list[int]]
    long: list[int]


def main() -> int:
    options = _options()
    machine = this_machine().fingerprint
    base = options.output or RESULTS / f"{date.today().isoformat()}-{_slug(machine)}-peers"
    run = datetime.now(UTC).isoformat(timespec="seconds")
    records = base.with_suffix(".jsonl")
    with open(records, "a") as file:
        write = _writer(file, run)
        write({"kind": "run", "machine": machine, "command": shlex.join(["compare.py", *sys.argv[1:]])})
        try:
            for model in options.models:
                texts = _texts(model, options)
                for form in options.formats:
                    _compare(model, form, texts, options, write)
        except WorkerError as error:
            print(error, file=sys.stderr)
            return 1
    text = markdown([json.loads(line) for line in records.read_text().splitlines()])
    base.with_suffix(".md").write_text(text)
    print(text)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("questions", nargs="+", choices=QUESTIONS, help="what to measure")
    add("--models", nargs="+", default=["qwen2.5-coder-1.5b"], help="targets: names that `bitdraft pull` knows")
    add("--formats", nargs="+", default=["w4a8"], help="of bitdraft's target")
    add("--draft", default="qwen2.5-coder-0.5b", help="the draft, for 'speculative'")
    add("--draft-format", default="w4a8", help="of bitdraft's draft")
    add("--k", nargs="+", type=int, default=[4], help="tokens that bitdraft drafts a step; each is a system of its own")
    add("--peers", nargs="*", help="instead of all of the same width: llama-cpp, openvino:int8+int4@5, ...")
    add("--rounds", type=int, default=5)
    add("--prompts", type=int, default=4, help="HumanEval prompts for 'decode' and 'speculative'")
    add("--tokens", type=int, default=64, help="new tokens after each of them")
    add("--prompt-tokens", type=int, default=512, help="for 'prefill'")
    add("--rows", nargs="+", type=int, default=[1, 2, 4, 6, 8], help="for 'step'")
    add("--context", nargs="+", type=int, default=[128], help="tokens in the cache, for 'step'")
    add("--repeats", type=int, default=5, help="steps of each kind in a round, of which the median counts")
    add("--threads", type=int, default=2)
    add("--environments", type=Path, default=environments_folder(), help="of the peers")
    add("--output", type=Path, help="instead of benchmarks/results/DATE-machine-peers, without a suffix")
    options = parser.parse_args()
    try:
        for form in options.formats:
            for question in options.questions:
                _systems(question, form, options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _writer(file: Any, run: str) -> Callable[[Record], None]:
    def write(record: Record) -> None:
        print(json.dumps({"run": run, **record}), file=file, flush=True)

    return write


def _texts(model: str, options: argparse.Namespace) -> Texts:
    tokenizer = open_source(model).tokenizer
    texts = [prompt.text or "" for prompt in load_workload("humaneval", None)]
    return Texts([tokenizer.encode(t) for t in texts[: options.prompts]], tokenizer.encode("".join(texts)))


def _systems(question: str, form: str, options: argparse.Namespace) -> list[System]:
    """Who is measured: bitdraft first, and who decodes plainly before who drafts.

    Raises:
        ValueError: a system that does not exist, or a format of bitdraft without peers of the same width.
    """
    ours = [System("bitdraft", form)]
    if question == "speculative":
        ours = [System("bitdraft", form, options.draft_format, k) for k in options.k]
    systems = [*ours, *peers_of(form, question == "speculative", options.peers)]
    if question == "speculative":  # output and speed of each target by itself are part of the answer
        return list(dict.fromkeys([*(s.plain for s in systems), *systems]))
    systems = list(dict.fromkeys(s.plain for s in systems))
    return [s for s in systems if s.name in STEPS] if question == "step" else systems


def _compare(model: str, form: str, texts: Texts, options: argparse.Namespace, write: Callable[[Record], None]) -> None:
    """Ask all questions for one format of bitdraft, beside one peer after the other: memory need not hold all peers."""
    asked = {question: _systems(question, form, options) for question in options.questions}
    everyone = [system for systems in asked.values() for system in systems]
    ours = [system for system in everyone if system.name == "bitdraft"]
    with ExitStack() as stack:
        our_workers = _load(stack, model, ours, texts, options, write)
        for peer in dict.fromkeys(system.name for system in everyone if system not in ours) or ("",):
            about = {"kind": "sample", "model": model, "format": form, "peer": peer}
            with ExitStack() as peer_stack:
                theirs = [system for system in everyone if system.name == peer]
                workers = our_workers | _load(peer_stack, model, theirs, texts, options, write)
                for question, systems in asked.items():
                    turns = [(system, workers[system]) for system in systems if system in workers]
                    if peer and all(system in ours for system, _ in turns):
                        continue
                    about |= {"question": question, "draft": options.draft if question == "speculative" else None}
                    for record in list(_QUESTIONS[question](turns, texts, options)):  # all of an answer or nothing
                        write({**about, **record})


def _load(
    stack: ExitStack,
    model: str,
    systems: Sequence[System],
    texts: Texts,
    options: argparse.Namespace,
    write: Callable[[Record], None],
) -> dict[System, Worker]:
    """A worker for every system; `stack` ends them."""
    options.environments.mkdir(parents=True, exist_ok=True)
    processes, workers = _processes(systems), dict[System, Worker]()
    for loaded in dict.fromkeys(processes.values()):
        draft = options.draft if loaded.draft_format else None
        job = Job(model, loaded.format, draft, loaded.draft_format, _context(texts, options), options.threads)
        log = options.environments / f"{_slug(str(loaded))}.log"
        workers[loaded] = stack.enter_context(Worker(loaded, job, options.environments, log))
        write({"kind": "worker", "system": str(loaded), "model": model, "versions": workers[loaded].versions})
        print(f"loaded {model} in {loaded}", file=sys.stderr)
    return {system: workers[loaded] for system, loaded in processes.items()}


def _processes(systems: Sequence[System]) -> dict[System, System]:
    """What is loaded for each system: one process for all draft lengths and, but in OpenVINO, for plain decoding."""
    with_draft = {s.plain: s.loaded for s in systems if s.draft_format and s.name != "openvino"}
    return {s: s.loaded if s.draft_format else with_draft.get(s, s) for s in systems}


def _context(texts: Texts, options: argparse.Namespace) -> int:
    """Tokens that every cache must hold."""
    wanted = [0]
    if {"decode", "speculative"} & set(options.questions):
        wanted.append(max(map(len, texts.prompts)) + options.tokens + LONGEST_BLOCK)
    if "prefill" in options.questions:
        wanted.append(options.prompt_tokens + 1)
    if "step" in options.questions:
        wanted.append(max(options.context) + max(options.rows))
    return -(-max(wanted) // 256) * 256


Turns = Sequence[tuple[System, Worker]]


def _in_turns(turns: Turns, number: int, case: str, ask: Callable[..., Record], *arguments: Any) -> Iterable[Record]:
    """One measurement of each system, one after the other: `ask(system, worker, *arguments)`."""
    for system, worker in turns:
        record = {"system": str(system), "round": number, "case": case, **ask(system, worker, *arguments)}
        print(f"{number} {case} {system} {record['value']:.2f}", file=sys.stderr)
        yield record


def _generate(turns: Turns, texts: Texts, options: argparse.Namespace) -> Iterable[Record]:
    """Outputs of every prompt, compared with what the same system's target writes plainly."""
    for system, worker in turns:
        for prompt in texts.prompts:
            _generated(system, worker, prompt, WARM_UP_TOKENS)
    plain: dict[tuple[System, str], list[int]] = {}
    for number in range(options.rounds):
        for i, prompt in enumerate(texts.prompts):
            for record in _in_turns(turns, number, str(i), _generated, prompt, options.tokens):
                system = System.parse(record["system"])
                known = plain.setdefault((system.plain, record["case"]), record["ids"])
                yield {**record, "as_plain": record["ids"] == known if system.draft_format else None}


def _generated(system: System, worker: Worker, prompt: list[int], tokens: int) -> Record:
    """Tokens a second after the first one came, and with prefill."""
    if system.draft_format:
        answer = worker.ask("speculate", prompt=prompt, tokens=tokens, draft_tokens=system.draft_tokens)
    else:
        answer = worker.ask("decode", prompt=prompt, tokens=tokens)
    later = len(answer["ids"]) - answer["first_tokens"]
    value = later / (answer["seconds"] - answer["first_seconds"]) if later else float("nan")
    counts = {"drafted": answer.get("drafted"), "accepted": answer.get("accepted")}
    return {**answer, **counts, "value": value, "whole": len(answer["ids"]) / answer["seconds"]}


def _prefill(turns: Turns, texts: Texts, options: argparse.Namespace) -> Iterable[Record]:
    """Prompts of one length, another one each round."""
    prompts = [texts.long[i : i + options.prompt_tokens] for i in range(options.rounds + 1)]
    for system, worker in turns:
        _prefilled(system, worker, prompts[-1])
    for number in range(options.rounds):
        yield from _in_turns(turns, number, "0", _prefilled, prompts[number])


def _prefilled(_: System, worker: Worker, prompt: list[int]) -> Record:
    answer = worker.ask("prefill", prompt=prompt)
    return {**answer, "value": len(prompt) / answer["seconds"]}


def _step(turns: Turns, texts: Texts, options: argparse.Namespace) -> Iterable[Record]:
    """Every width at every context; a context is filled once in each system."""
    for context in options.context:
        for number in range(options.rounds):
            for rows in options.rows:
                prompt, block = texts.long[:context], texts.long[context : context + rows]
                yield from _in_turns(turns, number, f"{rows}x{context}", _stepped, prompt, block, options.repeats)


def _stepped(_: System, worker: Worker, prompt: list[int], block: list[int], repeats: int) -> Record:
    answer = worker.ask("step", prompt=prompt, block=block, repeats=repeats)
    return {**answer, "rows": len(block), "context": len(prompt), "value": median(answer["ms"])}


_QUESTIONS: dict[str, Callable[[Turns, Texts, argparse.Namespace], Iterable[Record]]] = {
    "decode": _generate,
    "speculative": _generate,
    "prefill": _prefill,
    "step": _step,
}


if __name__ == "__main__":
    sys.exit(main())
