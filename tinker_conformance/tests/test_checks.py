"""Every check passes on a right server, and fails on one that makes the mistake it is there for."""

import socket
import sys
from pathlib import Path

import httpx
import pytest
from mini_server import KEY, MODEL, PROGRAM

from tinker_conformance.checks import TIERS, checks_of
from tinker_conformance.report import Outcome, Result
from tinker_conformance.run import run_checks
from tinker_conformance.server import Server

MISTAKES: dict[str, list[str]] = {
    # T0
    "another model is named": ["the_capabilities_name_the_model"],
    "dynamic config fails": ["the_client_config_is_answered"],
    "keys are not checked": ["a_wrong_key_is_refused"],
    "telemetry is lost": ["a_session_beats_reports_and_finishes"],
    "sessions do not finish": ["a_session_beats_reports_and_finishes"],
    "other model ids": ["a_model_tells_its_id_rank_and_name"],
    "ranks are wrong": [
        "a_model_tells_its_id_rank_and_name",
        "a_run_and_its_weights_are_described",
        "models_of_different_ranks_live_side_by_side",
    ],
    "results are JSON": ["results_of_training_are_protobuf"],
    "metrics without colon": ["results_of_training_are_protobuf"],
    "bodies are never compressed": ["a_body_is_compressed_if_the_server_asks_for_it"],
    "no ids of samples": ["samples_have_ids_from_the_start"],
    "samplers have no base": ["a_sampler_knows_its_base_model"],
    "unknown requests are waited for": ["an_unknown_request_is_refused"],
    "order is ignored": ["a_request_waits_for_the_ones_before_it", "an_optimizer_step_waits_for_its_gradient"],
    "repeated requests run again": ["a_repeated_forward_backward_counts_once", "a_repeated_optimizer_step_counts_once"],
    "repeated samples are new ones": ["a_repeated_sample_is_the_same_one"],
    "refusals are waited for": ["a_refused_request_is_not_waited_for"],
    "anything is accepted": ["malformed_training_data_are_refused"],
    "refusals are failures": [
        "bodies_that_cannot_be_read_are_refused",
        "malformed_sampling_requests_are_refused",
        "unknown_models_and_paths_are_refused",
    ],
    # T1
    "data of a batch mix": [
        "every_target_has_the_log_probability_of_its_own_sequence",
        "pictures_of_a_batch_do_not_mix",
    ],
    "positive log-probabilities": ["every_target_has_the_log_probability_of_its_own_sequence"],
    "attends to the future": ["a_log_probability_depends_on_the_tokens_before_it_alone"],
    "loss is a mean": ["cross_entropy_is_the_weighted_sum"],
    "loss of a batch is a mean": ["the_loss_of_a_batch_is_a_sum"],
    "gradient is doubled": ["the_gradient_is_that_of_the_loss", "the_gradient_through_a_picture_is_that_of_the_loss"],
    "norm is not clipped": ["the_gradient_is_that_of_the_loss"],
    "gradient of a batch is a mean": ["gradients_of_a_batch_are_summed"],
    "gradients replace each other": ["gradients_add_up_until_the_optimizer_step"],
    "forward leaves a gradient": ["gradients_add_up_until_the_optimizer_step"],
    "gradients stay after a step": ["gradients_add_up_until_the_optimizer_step"],
    "weights of zero fail": ["weights_of_zero_are_legal_and_change_nothing"],
    "negative weights are 0": [
        "negative_weights_turn_the_gradient_round",
        "a_custom_loss_has_the_gradient_of_its_closed_form",
    ],
    "weights are averaged": ["each_target_has_its_own_weight"],
    "ratio is ignored": ["importance_sampling_follows_its_formula"],
    "clipped tokens have a gradient": ["ppo_follows_its_formula", "gspo_follows_its_formula"],
    "thresholds are distances": ["ppo_takes_thresholds_of_the_ratio", "cispo_follows_its_formula"],
    "configuration is ignored": ["dro_follows_its_formula"],
    "no momentum": ["adam_remembers_its_moments"],
    "nothing is learned": ["training_lowers_the_loss", "a_part_of_the_layers_is_trained_or_refused"],
    "other targets are ignored": ["other_targets_are_computed_or_refused"],
    "several targets are turned round": ["several_targets_a_position_are_computed_or_refused"],
    "sampler is less exact": ["sampler_and_trainer_agree", "a_new_adapter_changes_nothing"],
    "sampler ignores adapters": ["sampler_and_trainer_agree", "saved_weights_are_loaded_by_path"],
    "samplers follow the model": ["a_sampler_keeps_the_weights_it_was_made_of"],
    "stop=[] keeps the end of text": ["as_many_samples_as_asked_for"],
    "n above 1 at temperature 0 fails": ["temperature_zero_is_greedy_for_any_number_of_samples"],
    "seed of samples is ignored": ["a_seed_repeats_what_is_sampled"],
    "stop tokens are cut off": ["a_stop_token_ends_a_sample_and_is_its_last"],
    "max_tokens is needed": ["a_sample_without_a_limit_ends_at_its_stop_token"],
    "the end of a prompt is ignored": ["log_probabilities_of_the_end_of_a_prompt"],
    "the likeliest come last": ["the_likeliest_tokens_of_a_prompt"],
    "loading does nothing": ["a_model_made_of_saved_weights_has_them", "names_of_weights_belong_to_a_model"],
    "moments are not loaded": ["training_goes_on_from_a_saved_state"],
    "checkpoints never change": ["checkpoints_are_listed_published_and_deleted"],
    "what exists stays": ["a_name_is_overwritten_only_when_asked"],
    # T2
    "pictures are ignored": ["a_picture_changes_what_comes_after_it_alone"],
    "pictures take one more position in the trainer": ["a_picture_takes_the_same_positions_in_sampler_and_trainer"],
    "expected tokens are ignored": ["the_expected_number_of_tokens_is_checked"],
    "pictures come first": ["pictures_are_read_in_their_order"],
    "trainer turns pictures round": [
        "sampler_and_trainer_see_the_same_pictures",
        "neighbouring_pictures_keep_their_order",
    ],
    "adapter is lost on pictures": ["an_adapter_is_applied_to_pictures_too"],
    "JPEG is darker": ["a_jpeg_is_read_as_a_png"],
    "trainer sees darker pictures": ["pictures_of_any_shape_are_read"],
    "broken pictures are grey": ["malformed_pictures_are_refused"],
    # T3
    "seed is ignored": ["equal_seeds_make_equal_models"],
    "a step moves all models": [
        "training_leaves_other_models_unchanged",
        "models_trained_in_turns_learn_as_each_alone",
        "a_step_applies_the_gradients_of_its_own_model",
        "clients_at_the_same_time_do_not_mix",
        "a_failing_client_disturbs_nobody",
    ],
    "samplers mix": ["samplers_of_several_models_do_not_mix"],
    "names are shared": ["names_of_weights_belong_to_a_model"],
    "models are never freed": ["finished_sessions_make_room"],
}
ENDLESS = {"refusals are waited for", "weights of zero fail", "models are never freed"}
"""The client waits, or asks again and again, until its time is up."""
OF_NEWER_SDKS = {
    "gspo_follows_its_formula",
    "log_probabilities_of_the_end_of_a_prompt",
    "a_name_is_overwritten_only_when_asked",
}
NEEDS_A_TOKENIZER = {"a_stop_string_ends_a_sample"}
TIER_OF = {name: tier for tier in TIERS for name in checks_of(tier)}


def make(server: Server, *mistakes: str) -> None:
    httpx.post(f"{server.base_url}/faults", json=list(mistakes)).raise_for_status()


@pytest.mark.timeout(1200)  # it is all checks, and on a busy machine several versions of the SDK try it at a time
def test_every_check_passes_on_a_right_server(server: Server) -> None:
    make(server)
    results = list(run_checks(server, ["T0", "T1", "T2", "T3"], [], 60))

    assert {each.check: each.message for each in results if each.outcome is Outcome.FAILED} == {}
    skipped = {each.check for each in results if each.outcome is Outcome.SKIPPED}
    assert skipped - OF_NEWER_SDKS == NEEDS_A_TOKENIZER


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed_by_the_check_that_is_there_for_it(server: Server, mistake: str) -> None:
    make(server, mistake)
    for check in MISTAKES[mistake]:
        [result] = run_checks(server, [TIER_OF[check]], [check], 6 if mistake in ENDLESS else 60)

        assert result.outcome is Outcome.FAILED, check
        assert result.message.startswith("no result within") == (mistake in ENDLESS), result.message


def test_there_is_a_mistake_for_every_check() -> None:
    noticed = {check for checks in MISTAKES.values() for check in checks}

    assert {name for name in TIER_OF if TIER_OF[name] != "T4"} - noticed == NEEDS_A_TOKENIZER
    assert noticed <= set(TIER_OF)


def run_restarts(folder: Path, *options: str) -> list[Result]:
    """T4 against a server of its own, which the checks kill and start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{sys.executable} {PROGRAM} --port {port} {' '.join(options)}"
    server = Server(
        base_url=f"http://127.0.0.1:{port}", api_key=KEY, model=MODEL, serve=command, group_file=folder / "group"
    )
    server.start()
    try:
        return list(run_checks(server, ["T4"], [], 240))
    finally:
        server.kill()


@pytest.mark.timeout(900)
def test_a_server_that_keeps_its_state_survives_kills(tmp_path: Path) -> None:
    results = run_restarts(tmp_path, "--state", str(tmp_path / "state"))

    assert {each.check: each.message for each in results if each.outcome is not Outcome.PASSED} == {}


@pytest.mark.timeout(900)
def test_a_server_that_forgets_fails_every_check_of_a_restart(tmp_path: Path) -> None:
    results = run_restarts(tmp_path)

    assert [each.check for each in results if each.outcome is not Outcome.FAILED] == []
