"""Make the findings of a check about a program: ranks, environment variables, files and processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpo.check.check_evaluator import CheckOutcome
from hpo.check.failure_advice import format_name_list
from hpo.check.file_snapshot import FileSnapshot
from hpo.check.finding import Finding
from hpo.check.training_comparison import (
    compare_networks,
    count_equal_steps,
    count_same_batches,
    has_same_batches,
    has_samples,
)
from hpo.script_objective import Script
from hpo.text_format import format_count

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_TORCHRUN_VARIABLES = (*_RANK_VARIABLES, "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")


def inspect_program(
    script: Script, outcomes: Sequence[CheckOutcome], files: Sequence[FileSnapshot]
) -> Iterator[Finding]:
    """Yield the findings about a program that is used as the objective.

    `files` has snapshots of the working directory before the first evaluation, and after each of the first two.
    """
    whole = outcomes[0]
    yield from _inspect_ranks(whole)
    if not whole.failure:
        yield from _inspect_networks(whole)
        way = f"--loss '{script.loss}'" if script.loss is not None else "hpo.report"
        yield Finding("ok", f"{format_count(len(whole.losses), 'report')} by {way} in the first evaluation")
    yield from _inspect_files(files)
    if any(trace.has_children for outcome in outcomes for trace in outcome.traces):
        yield Finding(
            "look",
            "Processes are still running when the program ends",
            "They are killed. Let the program wait for them",
        )


def _inspect_ranks(whole: CheckOutcome) -> Iterator[Finding]:
    read = sorted({name for trace in whole.traces for name in trace.variables if name in _TORCHRUN_VARIABLES})
    if read:
        yield Finding("ok", f"The program reads {format_name_list(read)}")
    if whole.ranks > 1 and whole.traces[0].steps and not set(read) & set(_RANK_VARIABLES):
        yield Finding(
            "wrong",
            "The program reads neither RANK, LOCAL_RANK nor WORLD_SIZE: each rank trains alone, on all samples",
            "Call torch.distributed.init_process_group(), or search with --ranks-per-worker 1",
        )


def _inspect_networks(whole: CheckOutcome) -> Iterator[Finding]:
    if whole.ranks == 1 or compare_networks(whole, None) is not None or has_same_batches(whole):
        return
    if steps := count_equal_steps(whole):
        is_different = has_samples(whole, whole) and not count_same_batches(whole)[0]
        batches = ", and train on different batches" if is_different else ""
        yield Finding("ok", f"All ranks have the same network after {format_count(steps, 'step')}{batches}")


def _inspect_files(files: Sequence[FileSnapshot]) -> Iterator[Finding]:
    if len(files) < 3:
        return
    before, first, second = files[:3]
    written = sorted(name for name in first if first[name] != before.get(name))
    again = sorted(name for name in second if second[name] != first.get(name))
    both = [name for name in written if name in again]
    if both:
        yield Finding(
            "look",
            f"Evaluations write to the same files: {format_name_list(both)}",
            "Workers would overwrite these files. Let each evaluation write to its own directory, {folder}",
        )
    elif written:
        yield Finding("ok", f"An evaluation writes {format_name_list(written)}, and the next one writes other files")
