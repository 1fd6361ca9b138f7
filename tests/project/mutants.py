"""Defects of one line, and the tests that find them.

    python tests/project/mutants.py [word ...]

Each is put alone into a copy of the tree, where the test beside it must fail; with words only those
that contain one. Code is found by its text and a test by its name: both may move to other files.
Run it when tests were made fewer or faster.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A text that occurs once in the package; the part of it that goes; what takes its place; a test.
MUTANTS = (
    ("vhat if vhat > v else v", "vhat > v", "not vhat <= v", "test_amsgrad_keeps_a_nan_of_v"),
    ("smallest if v < smallest else v", "v < smallest", "not v >= smallest",
     "test_a_nan_in_a_second_moment_of_adafactor_stays"),
    ("hp.zero if abs(linear) <= hp.l1", "<=", "<",
     "test_ftrl_without_regularisation_and_history_is_zero"),
    ("math.pow(float(real(beta)), float(step))", "float(real(beta))", "beta",
     "test_steps_are_those_of_the_reference"),
    ("(w if variance <= hp.zero", "<=", "<",
     "test_centered_rmsprop_waits_without_a_positive_variance"),
    ("if lr == 0.0 or ratio / lr > 1.0:", " or ratio / lr > 1.0", "", "test_clipped_lars_ratio"),
    ("if end - begin <= HOT:", "<=", "<", "test_hot_rows_are_summed_in_the_documented_order"),
    ("row < 0 or row >= n_rows", ">=", ">", "test_index_out_of_range"),
    ("*map(is_contiguous, arrays), *map(dtype_of, arrays),", "*map(is_contiguous, arrays), ", "",
     "test_what_no_step_can_take"),
    ("_count_changes(given.chosen.written)", "given.chosen.written", "[]",
     "test_autograd_sees_that_states_have_changed"),
    ("                or self._memory.overlaps(places, sizes)\n", "or ", "or False and ",
     "test_memory_that_moves_onto_another_parameter"),
    ("not are_there(every, found, sizes) or self._memory.overlaps(found, sizes)",
     " or self._memory.overlaps(found, sizes)", "",
     "test_values_of_a_sparse_gradient_in_the_memory_of_the_table"),
    ("is_counted = not any(k for own, k in at if own.is_replicate())", "is_replicate", "is_shard",
     "test_two_ranks"),
    ("is_finite = min(of_mesh(mesh, is_finite)) > 0.0", "min(of_mesh(mesh, is_finite))",
     "is_finite", "test_two_ranks"),
    ("p.dim == 0 < parameter.dim() - 1 for p in cuts", "p.dim == 0 < parameter.dim() - 1", "True",
     "test_two_ranks"),
    ("c.hp + hp_of[t] * c.hp_row_bytes", "hp_of[t]", "0",
     "test_groups_are_separate_optimizers_in_one"),
    ("dropped_row = n_rows if", "n_rows", "n_rows - 1",
     "test_drop_leaves_out_what_is_out_of_range"),
    ("count += (values[i] & exponent) == exponent", "+=", "=",
     "test_skip_nonfinite_in_the_last_tensor"),
    ("sums = c.measured + begin * 8", " * 8", "", "test_rows_of_equal_indices_are_summed_first"),
    ("quiet if x != x else rounded", "quiet if x != x else ", "",
     "test_every_float32_nan_stays_a_nan"),
    ("if np.float64(near) != x", "!=", "<", "test_float64_is_rounded_once"),
    ("stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWGRP | ", "",
     "test_entries_that_others_may_have_written_are_replaced"),
    ("array.dtype.itemsize >= dtype.itemsize", ">=", ">", "test_gradient_that_16_bits_cannot_hold"),
    ("if n_bytes and begin < end:", "n_bytes and ", "", "test_an_empty_array_shares_no_memory"),
    ("            last.wait(stream)", "wait", "query",
     "test_locked_launches_wait_for_the_last_one_of_their_device"),
    ("check.epsilon(where, \"epsilon\", self.epsilon, scalars[-1])", "scalars[-1]", "1.0",
     "test_what_each_argument_refuses"),
    ("if power > 1.0:", ">", ">=", "test_what_each_argument_takes"),
    ("if not -LARGEST <= value <= LARGEST:", "-LARGEST <= value <= LARGEST", "math.isfinite(value)",
     "test_what_each_argument_refuses"),
    ("check.scalar(self.name, \"beta2\", beta2)", "check.scalar(self.name, \"beta2\", beta2)",
     "beta2", "test_what_the_constructor_refuses"),
    ("check.no_overlap(self.name, [*variables, name], arrays)", "[*variables, name], arrays)",
     "[*variables], arrays[:-1]) + check.no_overlap(self.name, [name], arrays[-1:])",
     "test_arrays_that_overlap"),
    ("self._check_no_alias(written, read)", "self._check_no_alias(written, read)", "pass",
     "test_overlaps"),
    ("if bits > 63:", "63", "64", "test_rows_of_a_table_beyond_all_memory"),
    ("if minor not in TRIED[name]", "not in TRIED[name]", "in ()",
     "test_a_version_that_was_not_tried"),
    ("    if use_locking:\n        with locks.exclusive():\n            step.run()", "use_locking",
     "False", "test_use_locking_waits_for_other_calls"),
    ("max(norm, limit) if math.isfinite(norm) else math.nan", "math.nan", "0.0",
     "test_norm_that_is_not_finite_makes_nan"),
    ("if np.float32(scalars.beta1_power) == 1:", "np.float32", "float",
     "test_what_each_argument_refuses"),
    ("self.skip_nonfinite and given.layout.n_row_batches", "and given", "and not given",
     "test_skipping_does_not_hide_errors"),
    ("centralize and p.ndim >= 2", ">=", ">", "test_centralization"),
    ("if step >= len(array):", ">=", ">", "test_exhausted_list_of_rates"),
    ("0.0 if self._options[i].centralize", "0.0", "decay * scale", "test_centralization"),
    ('if factor and self._sparse_update != "lazy"', "!=", "==",
     "test_centralization_of_row_sparse_gradients"),
    ("counts.get(each, begin) + 1", "begin", "0", "test_uneven_counts"),
    ("if known is None or known[0] is not layout:", " or known[0] is not layout", "",
     "test_none_skips_a_parameter_and_its_count"),
    ("np.sqrt(squares[:, 0]), LARGEST_NORM", "np.sqrt(squares[:, 0])", "squares[:, 0]",
     "test_clipping_limits_each_tensor"),
    ("ids.begin <= begin <= end <= ids.end", "ids.begin <= ", "", "test_offsets_far_outside"),
    ('x["ids"] + x["begin"] * x["id_bytes"]', ' + x["begin"] * x["id_bytes"]', "",
     "test_an_output_in_the_memory_of_what_is_read"),
    ("self._records.get((sums, weighted))", "weighted", "True", "test_weights_in_some_forwards"),
    ("name, weights, lists[0].array.size)", "array.size", "n", "test_forms_of_weights"),
    ("and addresses_of(pooling.arrays) == pooling.addresses",
     "and addresses_of(pooling.arrays) == pooling.addresses", "",
     "test_a_table_that_moved_in_place"),
    ("weights.dtype is not real:", "not real", "None", "test_gradients_of_other_tables"),
    ("values.dtype is not kind.dtype:", "not kind.dtype", "None",
     "test_tables_of_several_kinds_in_one_step"),
    ("max(sums.n_gradients, source.n_gradients)", "max(sums.n_gradients, source.n_gradients)",
     "source.n_gradients", "test_rows_without_pooling"),
    ("gradient_of(tables[t], keys[begin] & mask)", "mask", "((1 << bits) - 1)",
     "test_options_of_the_optimizer"),
    (", Tensor.stride, memory.dtype_of", ", Tensor.stride", "",
     "test_tables_that_became_others_at_the_same_place"),
    ("if step is None or step.is_over:", " or step.is_over", "",
     "test_a_hook_of_a_step_may_go_backward"),
    ("for weight in gradients:\n                    weight.grad = None", "weight.grad = None",
     "pass", "test_gradients_from_elsewhere_act"),
    ("int(counts[0]) + 1 if are_same", " + 1", "", "test_steps_are_those_of_the_reference"),
    ("batch.draws.joined(seed, counts + 1, hp, row_of)", "counts + 1", "counts",
     "test_a_step_is_that_of_the_float32_weight"),
    ("[*map(row_of.__getitem__, each)]", "[*map(row_of.__getitem__, each)]", "[0] * len(each)",
     "test_none_skips_a_parameter_and_its_count"),
    ("[*plan.behind, *updates] if plan.behind else updates", "[*plan.behind, *updates]", "updates",
     "test_random_sequences"),
    ("[*map(bool, uses)]", "[*map(bool, uses)]", "[True] * len(uses)",
     "test_gradients_that_are_asked_for_take_no_step"),
    ("gradient.rows + np.int32(begins[id(gradient.values)])",
     " + np.int32(begins[id(gradient.values)])", "",
     "test_gradients_of_several_calls"),
    ("return gradient.without(row)", ".without(row)", "", "test_the_padding_row_of_an_embedding"),
)  # fmt: skip


def only_file(text: str, root: Path) -> Path:
    """The one with this text in the package."""
    files = [f for folder in ("kernels", "ops", "nn") for f in (root / folder).rglob("*.py")]
    found = [file for file in files for _ in range(file.read_text().count(text))]
    if len(found) != 1:
        sys.exit(f"mutants: {text!r} occurs {len(found)} times: expected once")
    return found[0]


def files_of(tests: Iterable[str], root: Path) -> list[str]:
    """The files with these tests."""
    texts = {str(file): file.read_text() for file in (root / "tests").rglob("test_*.py")}
    chosen = set()
    for test in tests:
        found = {file for file, text in texts.items() if f"def {test}(" in text}
        if not found:
            sys.exit(f"mutants: there is no test {test}")
        chosen |= found
    return sorted(chosen)


def failed(tests: set[str], root: Path) -> str | None:
    """The first of these tests that fails, or None."""
    environment = {
        **os.environ, "PYTHONPATH": str(root.parent), "FUSESTEP_CACHE_DIR": str(root / "cache"),
    }  # fmt: skip
    arguments = ["-qx", "--tb=no", "-p", "no:cacheprovider", "-k", " or ".join(tests)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *files_of(tests, root)],
        cwd=root, env=environment, capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode == 0:
        return None
    first = re.search(r"^(?:FAILED|ERROR) .*?::(\S+)", done.stdout, re.MULTILINE)
    if first is None:
        sys.exit(done.stdout + done.stderr)
    return first[1]


def copy_tree(root: Path) -> None:
    """All files that are not ignored, changed or not."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0"):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((ROOT / name).read_bytes())


def main(words: list[str]) -> int:
    """How many survive."""
    chosen = [m for m in MUTANTS if not words or any(w in " ".join(m) for w in words)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "fusestep"
        copy_tree(root)
        found = failed({test for *_, test in chosen}, root)
        if found is not None:
            sys.exit(f"mutants: {found} fails as it is")
        for text, old, new, test in chosen:
            file = only_file(text, root)
            whole = file.read_text()
            file.write_text(whole.replace(text, text.replace(old, new)))
            found = failed({test}, root)
            file.write_text(whole)
            survivors += found is None
            result = f"died of {found}" if found else "SURVIVED"
            print(f"{file.relative_to(root)}: {text.splitlines()[0]!r}: {result}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} died")
    return survivors


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
