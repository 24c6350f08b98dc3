r"""Write and read the learning curves of trained networks in benchmarks/curves.parquet.

These commands wrote the file, with one thread per rank:

    mpirun -n 1 python run_islands.py search_spaces/digits_cnn.py --run-dir digits --evaluations 300
        \ --propagators random --seed 1 --set epochs=27 --set patience=99
    mpirun -n 2 python run_islands.py search_spaces/text_transformer.py --run-dir text --evaluations
        200 \ --propagators random --seed 1 --set epochs=27 --ranks-per-worker 1 \ --set context=32
        --set train_samples=256 --set validation_samples=128 --set batch_size=16
    python -m benchmarks.curves digits text
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet

from hpo.results.reader import RunReader
from hpo.trainer.search_file import load_search_file

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("curves.parquet")
EPOCHS = 27


@dataclass(frozen=True)
class Curve:
    """The learning curve of one individual.

    Attributes:
        params: Hyperparameters.
        losses: Losses after each epoch, shape (epochs,). Shorter than `EPOCHS` if the evaluation
            failed.
        seconds: Seconds per epoch. Individuals that differ only in mutable parameters (which PBT
            may change) share the lowest measured time, since the machine also did other work.
    """

    params: dict[str, Any]
    losses: npt.NDArray[np.float32]
    seconds: float


def load(search_space: str) -> list[Curve]:
    """Load the curves of a search space. Its individuals were drawn at random."""
    rows = pyarrow.parquet.read_table(FILE).to_pylist()
    return [
        Curve(json.loads(row["params"]), np.array(row["losses"], np.float32), row["seconds"])
        for row in rows
        if row["search_space"] == search_space
    ]


def list_fixed_parameters(search_space: str) -> list[str]:
    """Return the names of the parameters that are not mutable, so that PBT must not change them."""
    return load_search_file(ROOT / "search_spaces" / f"{search_space}.py").space.immutable_names


def _get_fixed_values(search_space: str, params: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(params[name] for name in list_fixed_parameters(search_space))


def main() -> None:
    """Read the runs and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+")
    rows: list[dict[str, Any]] = []
    for run_dir in parser.parse_args().run_dirs:
        run = RunReader(run_dir)
        name, seconds = (
            Path(run.manifest.search_space).stem,
            defaultdict[tuple[Any, ...], list[float]](list),
        )
        evaluations = [one for one in run.read_evaluations() if one.is_finished]
        for one in evaluations:
            assert one.state == "failed" or len(one.curve) == EPOCHS, one
            seconds[_get_fixed_values(name, one.params)].append(
                one.seconds / max(1, len(one.curve))
            )
        for one in evaluations:
            losses = [one.curve[epoch] for epoch in sorted(one.curve)]
            least = min(seconds[_get_fixed_values(name, one.params)])
            rows.append(
                {
                    "search_space": name,
                    "params": json.dumps(one.params),
                    "seconds": least,
                    "losses": losses,
                }
            )
    kinds = {"search_space": pyarrow.string(), "params": pyarrow.string()}
    schema = pyarrow.schema(
        {**kinds, "seconds": pyarrow.float32(), "losses": pyarrow.list_(pyarrow.float32())}
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), FILE, compression="zstd")
    print(f"{len(rows)} individuals, {FILE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
