"""The advice: right where the truth is known, and honest where it is not."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from synthetic_trace import DRAFTS, Draft, Spec, synthetic_trace

from bitdraft.measure.figures import figures
from bitdraft.measure.recommend import Recommendation, recommend
from bitdraft.measure.trace import Trace

ONE = {"code": 0.8}


def advice(spec: Spec, seed: int = 0) -> Recommendation:
    return of(synthetic_trace(spec, seed))


def of(trace: Trace) -> Recommendation:
    return recommend(figures(trace, np.random.default_rng(0), 400))


def only(*names: str) -> Mapping[str, Draft]:
    return {name: DRAFTS[name] for name in names}


def words(found: Recommendation) -> str:
    return " ".join((found.headline, *found.reasons, *found.warnings))


def test_the_format_that_is_faster_is_taken() -> None:
    found = advice(Spec(acceptance=ONE, drafts={"bf16": Draft(1.0, 6.8, 16.0), "fp8": Draft(1.01, 4.0, 8.0)}))
    assert (found.verdict, found.draft_format, found.evidence) == ("speculate", "fp8", "predicted")
    assert found.speedup is not None
    assert found.speedup.low is not None
    assert found.speedup.low > 1
    assert found.sure is not None
    assert found.sure > 0.99
    assert found.k["code"] == found.default_k > 0
    assert "Next comes bf16" in words(found)


def test_words_hold_what_a_reader_needs_to_check() -> None:
    """c, acceptance, break-even and tokens per step, each by name and with figures."""
    found = advice(Spec(acceptance=ONE, drafts=only("w8a8")))
    text = words(found)
    for wanted in (
        "c = T_draft / T_target = 0.1",
        "conditional acceptance ",
        "Speculation pays above ",
        "tokens a step",
    ):
        assert wanted in text
    assert "% to " in text  # an interval
    assert "Nothing was run from end to end yet" in text


def test_do_not_speculate_when_a_draft_costs_too_much() -> None:
    found = advice(Spec(acceptance={"code": 0.5}, drafts={"bf16": Draft(1.0, 26.0, 16.0)}))
    assert (found.verdict, found.draft_format, found.default_k) == ("do not speculate", None, 0)
    assert found.k == {"code": 0}
    assert found.sure is not None
    assert found.sure > 0.99
    assert found.headline.startswith("Do not speculate")
    assert found.headline.endswith("it would be slower.")
    assert "K = 1" in found.reasons[0]
    assert found.speedup is not None
    assert found.speedup.value < 1


def test_even_a_perfect_draft_can_be_too_dear() -> None:
    found = advice(Spec(acceptance={"code": 0.99}, drafts={"bf16": Draft(1.0, 40.0, 16.0)}, k_values=(1,)))
    assert found.verdict == "do not speculate"
    assert "Even with every draft accepted it would be slower" in words(found)


def test_undecided_when_the_interval_holds_one() -> None:
    drafts = {"bf16": Draft(1.0, 16.0, 16.0)}
    found = advice(Spec(acceptance={"code": 0.62}, drafts=drafts, prompts=6, noise=0.2, rounds=5), seed=2)
    assert (found.verdict, found.draft_format) == ("undecided", "bf16")
    assert found.speedup is not None
    assert found.speedup.low is not None
    assert found.speedup.low < 1 < found.speedup.value
    assert found.sure is not None
    assert 0.6 < found.sure < 0.975
    assert "does not show it" in found.headline
    assert "The chance that it is faster than no speculation is 8" in found.reasons[0]


def test_no_gain_is_not_the_same_as_slower() -> None:
    drafts = {"bf16": Draft(1.0, 18.0, 16.0)}
    found = advice(Spec(acceptance={"code": 0.62}, drafts=drafts, prompts=6, noise=0.2, rounds=5), seed=2)
    assert found.verdict == "do not speculate"
    assert "no gain is to be seen" in found.headline
    assert found.sure is not None
    assert found.sure < 0.7


def test_each_workload_gets_its_own_length_or_none() -> None:
    drafts = {"bf16": Draft(1.0, 9.0, 16.0)}
    found = advice(Spec(acceptance={"code": 0.95, "chat": 0.05}, drafts=drafts, spread=0.3))
    assert found.verdict == "speculate"
    assert found.k["chat"] == 0
    assert found.k["code"] == found.default_k >= 3
    assert "no speculation for chat" in found.headline


def test_of_a_tie_the_smaller_is_taken() -> None:
    drafts = {"w8a8": Draft(1.0, 4.0, 8.0), "w4a16": Draft(1.0, 4.0, 4.5)}
    found = advice(Spec(acceptance=ONE, drafts=drafts))
    assert (found.draft_format, found.ties) == ("w4a16", ("w8a8",))
    assert "A tie with w8a8" in words(found)
    assert "it is the smallest, 272 MB packed" in words(found)


def test_a_tie_needs_no_sizes() -> None:
    drafts = {"w8a8": Draft(1.0, 4.0, 8.0), "w4a16": Draft(1.0, 4.01, 4.5)}
    found = of(replace(synthetic_trace(Spec(acceptance=ONE, drafts=drafts)), sizes={}))
    assert len(found.ties) == 1
    assert "by a hair" in words(found)


def test_a_low_bit_draft_that_is_not_faster_is_named() -> None:
    drafts = {"bf16": Draft(1.0, 5.0, 16.0), "w4a16": Draft(1.2, 6.5, 4.5)}
    found = advice(Spec(acceptance=ONE, drafts=drafts))
    assert found.draft_format == "bf16"
    (warning,) = (w for w in found.warnings if "w4a16 is not faster than bf16 on this machine" in w)
    assert "bitdraft doctor" in warning  # the synthetic trace was made without compiled kernels


def test_a_dead_draft_is_called_dead() -> None:
    drafts = {"bf16": Draft(1.0, 5.0, 16.0)}
    found = advice(Spec(acceptance={"code": 0.005}, drafts=drafts, spread=0.0))
    assert found.verdict == "do not speculate"
    assert found.warnings[0].startswith("bf16 on code: acceptance is 0.5%")
    assert "chat template" in found.warnings[0]


def test_end_to_end_runs_decide() -> None:
    """fp8 is predicted to win, but really takes 60% longer: what ran is believed."""
    drafts = {"bf16": Draft(1.0, 6.0, 16.0), "fp8": Draft(1.0, 3.0, 8.0)}
    confirm = tuple((name, k) for name in drafts for k in (3, 4))
    spec = Spec(acceptance=ONE, drafts=drafts, confirm=confirm, slow={"fp8": 1.6})
    found = advice(spec)
    assert (found.draft_format, found.evidence) == ("bf16", "confirmed")
    assert any("They differ by" in warning and "fp8" in warning for warning in found.warnings)
    assert not any("They differ by" in warning and "bf16" in warning for warning in found.warnings)


def test_what_did_not_run_is_said() -> None:
    drafts = {"bf16": Draft(1.0, 6.0, 16.0), "fp8": Draft(1.0, 3.0, 8.0)}
    found = advice(Spec(acceptance=ONE, drafts=drafts, confirm=(("bf16", 4),)))
    assert found.draft_format == "bf16"
    assert "fp8 was predicted to be faster still" in words(found)


def test_loops_do_not_count() -> None:
    trace = synthetic_trace(Spec(acceptance=ONE, drafts=only("bf16"), prompts=12))
    texts = dict(trace.texts)
    for index in range(4):
        text = texts["code", index]
        texts["code", index] = replace(text, ids=tuple([7, 8] * len(text.ids))[: len(text.ids)])
    looped = replace(trace, texts=texts)
    found = figures(looped, np.random.default_rng(0), 100)
    assert found.cells["bf16", "code"].prompts == 8
    assert any("4 texts are loops" in warning for warning in recommend(found).warnings)


def test_a_workload_of_loops_stays_out_of_the_advice() -> None:
    trace = synthetic_trace(Spec(drafts=only("bf16"), prompts=4))
    looped = {
        key: replace(text, ids=(1,) * len(text.ids)) if key[0] == "chat" else text for key, text in trace.texts.items()
    }
    found = figures(replace(trace, texts=looped), np.random.default_rng(0), 100)
    assert found.workloads == ("code",)
    assert any("chat: every text is a loop" in warning for warning in recommend(found).warnings)


def test_few_prompts_are_said_with_how_many_would_do() -> None:
    found = advice(Spec(acceptance=ONE, drafts=only("bf16"), prompts=6, spread=1.2))
    (sentence,) = [w for w in found.warnings if w.startswith("code: 6 prompts leave")]
    needed = int(sentence.split("About ")[1].split()[0])
    assert 10 <= needed < 500


def test_one_prompt_gives_no_interval() -> None:
    found = advice(Spec(acceptance=ONE, drafts=only("bf16"), prompts=1))
    assert found.verdict == "undecided"
    assert found.sure is None
    assert found.speedup is not None
    assert found.speedup.low is None
    assert any("1 prompt gives no interval" in warning for warning in found.warnings)


def test_noisy_timings_are_said() -> None:
    found = advice(Spec(acceptance=ONE, drafts=only("bf16"), noise=0.4, rounds=5))
    assert any("Time more rounds" in warning for warning in found.warnings)


@pytest.mark.parametrize(("margin", "wanted"), [(1e-4, "rounding."), (0.4, "a bug: report"), (None, "not recorded")])
def test_greedy_outputs_that_differ_are_judged_by_their_margin(margin: float | None, wanted: str) -> None:
    trace = synthetic_trace(Spec(acceptance=ONE, drafts=only("bf16"), temperature=0.0, confirm=(("bf16", 3),)))
    runs = list(trace.confirmations)
    at = next(i for i, run in enumerate(runs) if run.k)
    runs[at] = replace(runs[at], same_ids=False, first_difference=9, margin=margin)
    found = of(replace(trace, confirmations=tuple(runs)))
    assert any("1 of 20 greedy outputs differ" in w and wanted in w for w in found.warnings)


def test_without_timings_there_is_no_advice() -> None:
    found = of(replace(synthetic_trace(Spec(acceptance=ONE)), costs=()))
    assert (found.verdict, found.evidence, found.draft_format) == ("undecided", "none", None)
    assert "--resume" in words(found)


def test_an_interrupted_format_is_left_out_and_said() -> None:
    trace = synthetic_trace(Spec(acceptance=ONE, prompts=10))
    kept = {key: s for key, s in trace.scores.items() if key[0] != "w4a16" or key[2] < 3}
    found = figures(replace(trace, scores=kept), np.random.default_rng(0), 100)
    assert ("w4a16", "code") not in found.cells
    assert "w4a16" not in found.formats
    assert any("w4a16 was scored on 3 of 10 texts" in sentence for sentence in found.left_out)
    assert found.cells["bf16", "code"].prompts == 10


def test_formats_are_judged_on_the_same_prompts() -> None:
    trace = synthetic_trace(Spec(acceptance=ONE, prompts=10))
    kept = {key: s for key, s in trace.scores.items() if key[0] != "w4a16" or key[2] < 8}
    found = figures(replace(trace, scores=kept), np.random.default_rng(0), 100)
    assert {cell.prompts for cell in found.cells.values()} == {8}
    assert any("Of 10 texts of code, 8 were scored" in sentence for sentence in found.left_out)
