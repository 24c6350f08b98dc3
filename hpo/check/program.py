"""The points of a check about a program: ranks, environment variables, files and processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpo.check.advice import listed
from hpo.check.bench import Outcome
from hpo.check.files import Files
from hpo.check.point import Point
from hpo.check.training import compare_networks, count_equal_steps, count_same_batches, has_same_batches, has_samples
from hpo.script import Script
from hpo.text import counted

_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_OF_TORCHRUN = (*_RANKS, "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")


def points_on_program(script: Script, outcomes: Sequence[Outcome], files: Sequence[Files]) -> Iterator[Point]:
    """Yield the points about a program; `files` are those before and after each of its first two evaluations."""
    whole = outcomes[0]
    yield from _on_ranks(whole)
    if not whole.failure:
        yield from _on_networks(whole)
        way = f"--loss '{script.loss}'" if script.loss is not None else "hpo.report"
        yield Point("ok", f"{counted(len(whole.losses), 'report')} by {way} in the first evaluation")
    yield from _on_files(files)
    if any(one.has_children for outcome in outcomes for one in outcome.seen):
        yield Point("look", "Processes are left when the program ends", "They are killed then: let it wait for them")


def _on_ranks(whole: Outcome) -> Iterator[Point]:
    read = sorted({name for one in whole.seen for name in one.variables if name in _OF_TORCHRUN})
    if read:
        yield Point("ok", f"It reads {listed(read)}")
    if whole.ranks > 1 and whole.seen[0].steps and not set(read) & set(_RANKS):
        yield Point(
            "wrong",
            "It reads neither RANK nor LOCAL_RANK nor WORLD_SIZE: each rank trains by itself, on all samples",
            "Call torch.distributed.init_process_group(), or search it with --ranks-per-worker 1",
        )


def _on_networks(whole: Outcome) -> Iterator[Point]:
    if whole.ranks == 1 or compare_networks(whole, None) is not None or has_same_batches(whole):
        return
    if steps := count_equal_steps(whole):
        is_different = has_samples(whole, whole) and not count_same_batches(whole)[0]
        batches = ", and train on different batches" if is_different else ""
        yield Point("ok", f"All ranks have the same network after {counted(steps, 'step')}{batches}")


def _on_files(files: Sequence[Files]) -> Iterator[Point]:
    if len(files) < 3:
        return
    before, first, second = files[:3]
    written = sorted(name for name in first if first[name] != before.get(name))
    again = sorted(name for name in second if second[name] != first.get(name))
    both = [name for name in written if name in again]
    if both:
        yield Point(
            "look",
            f"Evaluations write to the same files: {listed(both)}",
            "Workers would overwrite each other's: give the program a directory of its own, {folder}",
        )
    elif written:
        yield Point("ok", f"An evaluation writes {listed(written)}, and the next one other files")
