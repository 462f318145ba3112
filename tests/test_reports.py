"""Reports of users of other programs, row by row: which test shows that bitdraft does not do this to its own.

Each row of the list that the project keeps of such reports has a number. A row stands here with the tests that show it,
with the reason why nothing does, or with both where a part of it is not built.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SHOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "U01": (
        "speculation that loses is switched off, and it is said why",
        (
            "unit/test_controller.py::test_never_slower_than_plain",
            "unit/test_controller.py::test_the_reason_for_no_drafts_is_said",
        ),
    ),
    "U02": (
        "the length that is chosen is the fastest, and what a draft costs is shown",
        (
            "unit/test_controller.py::test_it_comes_to_the_best_fixed_length",
            "unit/test_recommend.py::test_words_hold_what_a_reader_needs_to_check",
            "unit/test_recommend.py::test_do_not_speculate_when_a_draft_costs_too_much",
        ),
    ),
    "U03": (
        "how fast the target is counts in the advice",
        (
            "unit/test_recommend.py::test_the_format_that_is_faster_is_taken",
            "unit/test_recommend.py::test_even_a_perfect_draft_can_be_too_dear",
        ),
    ),
    "U05": (
        "processors have costs of their own, measured",
        (
            "unit/test_controller.py::test_never_slower_than_plain",
            "unit/test_curve.py::test_the_curve_is_what_the_steps_took",
        ),
    ),
    "U07": (
        "a server drafts and accepts what the library does",
        ("serve/test_completions.py::test_http_and_python_draft_and_accept_the_same_u07",),
    ),
    "U08": (
        "a threshold changes how much is drafted, not the text",
        ("serve/test_user_reports.py::test_a_threshold_of_confidence_shortens_blocks_and_changes_no_text_u08",),
    ),
    "U09": ("no loss under load", ("unit/test_controller.py::test_never_slower_than_plain",)),
    "U12": ("the length follows the text", ("unit/test_controller.py::test_the_length_follows_the_text_and_recovers",)),
    "U13": (
        "speculation off for one request",
        ("serve/test_completions.py::test_speculation_is_switched_off_for_one_request_u13",),
    ),
    "U16": (
        "target and draft have formats of their own",
        ("serve/test_user_reports.py::test_target_and_draft_have_formats_of_their_own_u16",),
    ),
    "U17": (
        "formats of a draft beside each other, in one report",
        ("end_to_end/test_measure.py::test_a_measurement_ends_in_four_files_and_a_matrix",),
    ),
    "U18": (
        "a low-bit draft that is slower is named",
        ("unit/test_recommend.py::test_a_low_bit_draft_that_is_not_faster_is_named",),
    ),
    "U19": (
        "the draft's keys and values change no token",
        ("serve/test_user_reports.py::test_the_draft_s_keys_and_values_change_no_token_u19_u71",),
    ),
    "U20": (
        "both formats of keys and values are shown",
        ("serve/test_process.py::test_the_effective_configuration_is_shown_u20_u55",),
    ),
    "U25": (
        "a vocabulary that is not the target's is refused",
        ("unit/test_tokenizer.py::test_ids_that_differ_are_named",),
    ),
    "U26": (
        "texts that loop do not count",
        (
            "unit/test_load.py::test_loops_are_flagged_and_do_not_count",
            "unit/test_recommend.py::test_loops_do_not_count",
        ),
    ),
    "U27": (
        "past the draft's context, and acceptance by length",
        (
            "end_to_end/test_greedy_parity.py::test_a_draft_with_a_shorter_context_stops_drafting_and_nothing_else",
            "serve/test_metrics.py::test_acceptance_is_told_by_context_u27",
        ),
    ),
    "U28": (
        "greedy texts are those of plain decoding; a difference is judged by its margin",
        (
            "end_to_end/test_greedy_parity.py::test_a_mixed_batch_says_what_each_says_alone",
            "unit/test_recommend.py::test_greedy_outputs_that_differ_are_judged_by_their_margin",
        ),
    ),
    "U29": (
        "the same with low bits in weights, keys and values",
        (
            "properties/test_serving_exact.py::test_low_bit_keys_and_values_under_half_wrong_drafts",
            "properties/test_kv_exact.py::test_greedy_texts_are_those_of_plain_decoding",
        ),
    ),
    "U33": (
        "tokens are drawn from the very law that they are accepted by",
        (
            "properties/test_engine_lossless.py::test_a_batch_of_different_requests",
            "properties/test_lossless.py::test_seeded_runs_follow_the_enumerated_law",
        ),
    ),
    "U34": (
        "no token outside of what the filters allow",
        ("serve/test_user_reports.py::test_no_token_is_sampled_that_the_filters_exclude_u34",),
    ),
    "U35": ("penalties hold", ("properties/test_sampling_reports.py::test_u35_penalties_are_not_ignored",)),
    "U37": (
        "biases and min-p hold at every place",
        ("properties/test_sampling_reports.py::test_u37_logit_bias_and_min_p_hold_at_every_position",),
    ),
    "U38": (
        "min tokens count output tokens",
        ("properties/test_sampling_reports.py::test_u38_min_tokens_counts_output_tokens",),
    ),
    "U39": (
        "a ban holds in every block",
        ("properties/test_sampling_reports.py::test_u39_a_ban_of_every_second_id_holds_for_200_tokens",),
    ),
    "U41": ("seeds side by side", ("properties/test_serving.py::test_one_greedy_request_among_seeds",)),
    "U42": (
        "log-probabilities are the target's",
        ("serve/test_completions.py::test_logprobs_are_the_target_s_own_u42",),
    ),
    "U44": (
        "prompts are scored as without a draft",
        ("serve/test_user_reports.py::test_prompts_are_scored_alike_beside_a_draft_u44",),
    ),
    "U45": (
        "JSON mode beside drafts",
        (
            "serve/test_user_reports.py::test_thirty_at_once_in_json_mode_u45",
            "properties/test_sampling_reports.py::test_u45_a_grammar_that_fails_ends_the_draft_and_not_the_step",
        ),
    ),
    "U47": (
        "a grammar begins where reasoning ends",
        ("unit/test_structured.py::test_a_grammar_begins_at_the_end_of_its_marker",),
    ),
    "U48": (
        "drafts end where a grammar forbids them",
        (
            "properties/test_sampling_reports.py::test_u48_drafts_end_before_the_first_token_that_a_grammar_does_not_allow",
        ),
    ),
    "U49": (
        "the first drafted token is verified; ties; errors take nothing along",
        (
            "properties/test_serving.py::test_an_error_of_a_whole_step_takes_nothing_back",
            "end_to_end/test_greedy_parity.py::test_after_an_error_the_next_request_is_served_as_ever",
            "unit/test_sampling.py::test_temperature_zero_is_the_lowest_of_the_largest",
        ),
    ),
    "U50": ("padded vocabularies", ("unit/test_tokenizer.py::test_sizes_and_padding_are_no_obstacle",)),
    "U52": ("a refused pair says which ids differ", ("unit/test_tokenizer.py::test_ids_that_differ_are_named",)),
    "U53": (
        "a foreign vocabulary is refused, with what to do",
        ("end_to_end/test_generate.py::test_models_of_two_vocabularies_are_refused_with_the_ids",),
    ),
    "U54": (
        "target and draft read the same ids",
        ("serve/test_user_reports.py::test_target_and_draft_are_fed_the_same_ids_with_one_beginning_u54",),
    ),
    "U55": (
        "defaults of sampling are shown",
        ("serve/test_process.py::test_generation_config_gives_defaults_and_requests_win_u55",),
    ),
    "U56": (
        "what cannot be loaded ends the start",
        ("end_to_end/test_serve_verb.py::test_what_cannot_be_served_is_one_message_and_code_two_u56",),
    ),
    "U57": (
        "nothing after an end inside a block",
        ("properties/test_serving.py::test_a_stop_id_inside_a_block_ends_there",),
    ),
    "U61": (
        "reasoning tokens are counted exactly",
        ("serve/test_event_streams.py::test_reasoning_is_split_off_and_counted_u61",),
    ),
    "U62": (
        "near the end of the context",
        ("serve/test_completions.py::test_the_context_ends_the_answer_and_not_the_server_u62",),
    ),
    "U64": (
        "blocks longer than what is left",
        ("serve/test_user_reports.py::test_a_block_longer_than_what_is_left_u64",),
    ),
    "U66": (
        "windows of attention under drafts",
        ("agreement/test_families.py::test_a_draft_changes_nothing_past_the_window",),
    ),
    "U67": (
        "keys and values in codes go back exactly",
        (
            "properties/test_kv_exact.py::test_logits_do_not_depend_on_the_schedule",
            "properties/test_serving_exact.py::test_low_bit_keys_and_values_under_half_wrong_drafts",
        ),
    ),
    "U68": (
        "a warm prefix changes no token",
        ("serve/test_shared_prefix.py::test_five_questions_after_one_system_prompt_cold_and_warm_u68",),
    ),
    "U69": (
        "as much is cached with a draft as without",
        ("serve/test_shared_prefix.py::test_as_much_is_cached_with_a_draft_as_without_u69",),
    ),
    "U70": (
        "scales of fp8 are found, or said to be missing",
        (
            "unit/test_kv_scheme.py::test_u70_scales_of_one_are_not_called_calibrated",
            "unit/test_kv_scheme.py::test_u70_a_folder_that_lost_its_scales_falls_back_and_says_so",
        ),
    ),
    "U71": (
        "fp8 of the target is not forced on the draft",
        ("serve/test_user_reports.py::test_the_draft_s_keys_and_values_change_no_token_u19_u71",),
    ),
    "U72": (
        "both models' memory is planned",
        ("serve/test_process.py::test_what_does_not_fit_is_refused_with_the_table_u72",),
    ),
    "U73": (
        "so are the logits of a step",
        ("serve/test_process.py::test_what_does_not_fit_is_refused_with_the_table_u72",),
    ),
    "U75": (
        "groups that do not divide are named before any work",
        (
            "unit/test_quantize.py::test_layers_that_do_not_fit_are_all_named_before_any_work",
            "unit/test_formats.py::test_a_group_that_does_not_divide_is_refused_with_what_would",
        ),
    ),
    "U74": (
        "another draft while the server runs",
        (
            "serve/test_another_draft.py::test_four_streams_end_as_they_would_have_u74",
            "serve/test_another_draft.py::test_the_old_draft_leaves_nothing_behind_u74",
        ),
    ),
    "U76": ("every group size against the reference", ("agreement/test_native_linear.py::test_any_shape",)),
    "U78": (
        "what is no number ends its request",
        ("properties/test_serving.py::test_logits_that_are_no_numbers_end_their_request_alone",),
    ),
    "U79": (
        "too few texts are refused",
        ("unit/test_quantize.py::test_a_method_without_texts_or_with_too_few_is_refused_before_any_work",),
    ),
    "U80": (
        "a model is at no distance from itself",
        ("end_to_end/test_measure.py::test_a_draft_that_is_the_target_is_always_right",),
    ),
    "U81": ("characters stay whole", ("serve/test_event_streams.py::test_no_character_is_split_u81",)),
    "U82": (
        "tool calls however they are cut",
        (
            "unit/test_tool_calls.py::test_calls_are_the_same_however_the_text_is_cut",
            "serve/test_event_streams.py::test_tool_calls_come_whole_and_in_pieces_u82",
        ),
    ),
    "U83": ("the shape of streams", ("serve/test_event_streams.py::test_a_stream_has_openai_s_shape_u83",)),
    "U84": (
        "who leaves is not served on",
        ("serve/test_event_streams.py::test_a_client_that_leaves_stops_its_request_u84",),
    ),
    "U85": (
        "nobody reads another's text",
        (
            "serve/test_soak.py::test_150_mixed_requests_lose_nothing_and_are_told_what_they_are_told_alone",
            "serve/test_shared_prefix.py::test_who_stays_is_told_what_it_is_told_alone_u68_u84_u85",
            "properties/test_serving.py::test_sixteen_at_once",
        ),
    ),
    "U86": (
        "temperature 0 is one text under load",
        ("serve/test_user_reports.py::test_temperature_zero_is_one_text_under_any_load_u86",),
    ),
    "U87": ("batches draft", ("serve/test_user_reports.py::test_a_batch_drafts_u87",)),
    "U88": (
        "what evaluation asks for",
        (
            "serve/test_lm_eval_requests.py::test_a_log_likelihood_request_u88",
            "clients/test_lm_eval.py::test_log_likelihoods_are_the_model_s_own_u88",
        ),
    ),
    "U89": (
        "times of pieces with several tokens",
        (
            "unit/test_load.py::test_pieces_with_several_tokens_are_timed_in_both_definitions",
            "serve/test_event_streams.py::test_running_usage_counts_every_token_u89",
        ),
    ),
    "U90": (
        "what acceptance is",
        (
            "unit/test_stats.py::test_the_acceptance_meter",
            "unit/test_controller.py::test_positions_behind_a_rejection_are_not_touched",
        ),
    ),
    "U91": (
        "figures of each request add up to those of the server",
        ("serve/test_metrics.py::test_counters_are_the_sums_of_the_responses_u91",),
    ),
    "U92": (
        "accepted tokens can be audited",
        (
            "serve/test_user_reports.py::test_every_origin_can_be_audited_u92",
            "serve/test_user_reports.py::test_what_repeats_is_drafted_u92",
        ),
    ),
    "U93": (
        "a draft is found by the server",
        (
            "serve/test_auto_draft.py::test_the_smallest_that_fits_is_chosen_and_the_others_are_named",
            "serve/test_auto_draft.py::test_what_to_expect_of_it_is_said_u93",
        ),
    ),
}
"""By row: what is right here, and the tests that show it."""

NOT_SHOWN = {
    "U06": "models are placed on GPUs: bitdraft runs on processors",
    "U19": "its table of acceptance by bits: `measure` takes one format of keys and values at a time",
    "U21": "draft heads that read hidden states are not built; a draft model is measured again with `measure`",
    "U23": "training a draft is not built",
    "U25": "reduced vocabularies with a map are not built; without one they are refused",
    "U52": "ids that differ are not masked: the pair is refused",
    "U53": "drafts of another vocabulary are not built: the pair is refused",
    "U65": "models with states that cannot go back are not built: an unknown family is refused at load",
    "U73": "that peaks of memory are as planned needs a machine that nobody else uses",
    "U79": "the gate on quality after quantisation: `quantize` reports it, and refuses nothing by it",
    "U94": "adapters are not built",
}
"""By row: why no test shows it, or not all of it."""

ROWS = (
    "01 02 03 05 06 07 08 09 12 13 16 17 18 19 20 21 23 25 26 27 28 29 33 34 35 37 38 39 41 42 44 45 47 48 49 50 52 53 "
    "54 55 56 57 61 62 64 65 66 67 68 69 70 71 72 73 74 75 76 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94"
)


@cache
def names(path: Path) -> set[str]:
    """Every test function of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def test_every_row_has_a_test_or_a_reason() -> None:
    assert SHOWN.keys() | NOT_SHOWN.keys() == {f"U{number}" for number in ROWS.split()}


@pytest.mark.parametrize("row", SHOWN)
def test_the_tests_of_a_row_exist(row: str) -> None:
    for test in SHOWN[row][1]:
        file, _, name = test.partition("::")
        assert name in names(TESTS / file), test


def test_a_test_that_is_named_after_a_row_stands_in_the_table() -> None:
    """So that a row that is named in a test's name is not forgotten here."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in names(path):
            rows = {
                part.upper() for part in name.split("_") if len(part) == 3 and part[0] == "u" and part[1:].isdigit()
            }
            assert rows <= SHOWN.keys(), f"{path.name}::{name}"
