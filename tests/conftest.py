"""torch is imported once, here; every rank of every test is forked from this process."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

import tests.world  # noqa: F401

# Rows that take long beside others of their table that stay: slow proofs, like those marked so.
LONG = """
checkpoint/test_experts.py::test_experts_of_one_mesh_load_on_any_other_with_their_moments[ep4]
checkpoint/test_with_trainer.py::test_a_run_whose_first_step_was_skipped_resumes_bit_by_bit[SGD-mesh1]
models/test_hf_config.py::test_a_changed_key_is_refused_by_name_or_gives_transformers_logits[mistral]
models/test_hf_config.py::test_a_changed_key_is_refused_by_name_or_gives_transformers_logits[mixtral]
models/test_hf_config.py::test_a_changed_key_is_refused_by_name_or_gives_transformers_logits[qwen2]
models/test_hf_config.py::test_a_changed_key_is_refused_by_name_or_gives_transformers_logits[qwen3]
models/test_hf_config.py::test_a_changed_key_is_refused_by_name_or_gives_transformers_logits[qwen3_moe]
observe/test_metrics.py::test_wandb_offline_holds_the_same_numbers
ops/test_kernels.py::test_kernels_compile_for_hopper
optim/test_low_precision.py::test_a_run_resumes_bit_by_bit
parallel/test_collective_counts.py::test_a_mixture_of_experts_costs_a_layer_its_exchanges_and_no_more[sequence-parallel]
parallel/test_collective_counts.py::test_a_step_adds_two_all_reduces_and_a_logged_one_two_more[3-3]
parallel/test_expert_meshes.py::test_any_mesh_computes_what_one_process_computes[2-dp2 ep1]
parallel/test_expert_meshes.py::test_any_mesh_computes_what_one_process_computes[4-dp4 ep2]
parallel/test_memory_budget.py::test_a_whole_budget_keeps_what_a_compiled_layer_keeps_without_one
parallel/test_memory_budget.py::test_gradients_are_those_of_a_whole_budget_to_the_bit
parallel/test_tensor_plan.py::test_it_does_under_fsdp_and_with_layers_computed_again[everything, with sp, full]
parallel/test_tensor_plan.py::test_the_plan_computes_what_the_plain_decoder_computes[plain, with sp, cut loss-4]
parity/test_context.py::test_a_mixture_whose_sequences_are_shared_equals_one_process[ep2-of-cp2-allgather]
parity/test_context.py::test_a_mixture_whose_sequences_are_shared_equals_one_process[ep4-of-cp2-tp2-ring]
parity/test_context.py::test_rows_of_documents_shared_by_ranks_equal_one_process[cp2-dp2-ring]
parity/test_context.py::test_rows_of_documents_shared_by_ranks_equal_one_process[cp2-pp2-allgather]
parity/test_context.py::test_rows_of_documents_shared_by_ranks_equal_one_process[cp4-plain-order-ring]
parity/test_experts.py::test_a_mixture_goes_on_from_any_mesh_as_if_it_had_not_stopped
parity/test_families.py::test_a_family_trains_on_every_axis_as_on_one_process[qwen3]
parity/test_families.py::test_dropout_drops_the_same_on_tensor_parallel_ranks[options1]
parity/test_parity.py::test_a_tied_embedding_is_one_weight_on_every_mesh[pp4-1F1B-unclipped]
parity/test_parity.py::test_accumulation_changes_nothing[3-1]
parity/test_parity.py::test_clipping_by_other_norms_equals_one_process[dp2-tp2-1.0]
parity/test_parity.py::test_each_form_of_tensor_parallelism_equals_one_process[without-sp-dp2-tp2-unclipped]
parity/test_parity.py::test_every_zero_stage_equals_one_process[dp2-tp2-1-unclipped]
parity/test_parity.py::test_every_zero_stage_equals_one_process[dp2-tp2-2-unclipped]
parity/test_parity.py::test_recomputation_changes_nothing[dp2-tp2-every-third-unclipped]
parity/test_parity.py::test_recomputation_changes_nothing[dp2-tp2-full-unclipped]
parity/test_parity.py::test_replicas_of_shards_equal_one_process[dp_replicate2-dp_shard2-1-unclipped]
parity/test_parity.py::test_the_validation_loss_is_the_same_on_every_mesh[dp2-tp2]
parity/test_resume.py::test_a_chain_of_meshes_gives_the_curve_of_one_process[three-zero-stages]
parity/test_resume.py::test_three_steps_and_three_more_are_six_bit_by_bit[dp_shard2-async]
precision/test_compile.py::test_compiled_equals_eager[rowwise-one]
precision/test_gather.py::test_gathered_in_float8_it_is_the_same_in_fewer_bytes[rowwise-dp2]
test_bench_scripts.py::test_a_row_of_the_table_is_a_run_of_its_own
test_convert.py::test_the_scripts_convert_there_and_back_and_print_the_names
test_mesh.py::test_every_degree_of_ep_agrees_with_counting[False]
test_mesh.py::test_every_view_of_every_factorisation_agrees_with_the_formula[16-ranks1]
""".strip().splitlines()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/") in LONG:
            item.add_marker(pytest.mark.slow)
