"""The stages of a run on a leader: it breeds individuals, and records their evaluations.

Collective: call each function on all leaders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpo.breeding.islands import IslandWorker
from hpo.evaluation.leader import Checkpointer, Leader, Limits
from hpo.evaluation.weights_saver import WeightsSaver
from hpo.process.linux import identify_pid_namespace
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.rpc import RpcClient
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import CONFIRMATION_PREFIX
from hpo.store.study_client import ReceivedChanges, StudyClient

if TYPE_CHECKING:
    from hpo.run.run_search import SearchRank


def search(rank: SearchRank, leaders: SleepingComm, client: RpcClient) -> None:
    """Breed individuals, claim them in the study, and evaluate them until the search is over.

    The rank of a leader in `leaders`, all of them, is the index of its worker. `client` calls the
    writer of the study, which runs on the first rank.
    """
    options = rank.options
    manifest = rank.manifest
    script = rank.state.problem.file.script
    study = _make_study_client(rank, client, _share_changes(leaders))
    limits = Limits(
        options.evaluation_timeout,
        options.max_failures or None,
        options.target_loss,
        manifest.pruner != "none",
        script.first_report if script else 1,
    )
    checkpointer = Checkpointer(
        CheckpointStore(rank.run_dir.checkpoints),
        options.checkpoint_every,
        manifest.layout.islands if manifest.pbt else 0,
    )
    space = rank.state.problem.space
    worker = IslandWorker(leaders, study, space, manifest.layout, options)
    evaluator = rank.make_evaluator(_make_leader(rank, study, limits, checkpointer))
    worker.run(evaluator.evaluate)
    evaluator.end()


def confirm(rank: SearchRank, leaders: SleepingComm, client: RpcClient) -> None:
    """Run all confirmations that the study has enqueued. The arguments are those of `search`."""
    study = _make_study_client(rank, client)
    store = CheckpointStore(rank.run_dir.checkpoints, CONFIRMATION_PREFIX)
    checkpointer = Checkpointer(store, rank.options.checkpoint_every)
    limits = Limits(rank.options.evaluation_timeout)
    leader = _make_leader(rank, study, limits, checkpointer)
    evaluator = rank.make_evaluator(leader, CONFIRMATION_PREFIX)
    worker = leaders.rank
    island = rank.manifest.layout.find_island(worker)
    leaders.barrier()  # The first rank must show progress before an evaluation ends.
    while (assignment := study.claim(None, island=island, worker=worker)) is not None:
        if evaluator.evaluate(assignment).is_stopped:
            break
    evaluator.end()
    study.call.commit()
    leaders.barrier()


def _share_changes(leaders: SleepingComm) -> ReceivedChanges:
    """Return the received changes of this leader, which it shares with the leaders of its host.

    Collective: call on all leaders. All of them must call it before any of them ends the stage.
    """
    received = ReceivedChanges()
    namespace = identify_pid_namespace()
    files = leaders.allgather((namespace, received.path, received.name))
    path, name = next((path, name) for other, path, name in files if other == namespace)
    if name != received.name:
        received.share_file(path, name)
    return received


def _make_study_client(
    rank: SearchRank, client: RpcClient, received: ReceivedChanges | None = None
) -> StudyClient:
    watch = rank.job.watch
    return StudyClient(
        client.call,
        client.notify,
        rank.manifest.objectives,
        lambda: watch.active_stop is not None,
        rank.group.describe_places(),
        received,
    )


def _make_leader(
    rank: SearchRank, study: StudyClient, limits: Limits, checkpointer: Checkpointer
) -> Leader:
    weights_saver = WeightsSaver(study, rank.manifest.settings)
    return Leader(study, limits, rank.job.watch.stop_run, checkpointer, weights_saver)
