r"""Learning curves of networks that this project has trained, with their hyperparameters: benchmarks/curves.parquet.

    mpirun -n 1 python run_islands.py search_spaces/digits_cnn.py --run-dir digits --evaluations 300 \
        --propagators random --seed 1 --set epochs=27 --set patience=99
    mpirun -n 2 python run_islands.py search_spaces/text_transformer.py --run-dir text --evaluations 200 \
        --propagators random --seed 1 --set epochs=27 --ranks-per-worker 1 \
        --set context=32 --set train_samples=256 --set validation_samples=128 --set batch_size=16
    python -m benchmarks.curves digits text

have made it, with one thread for each rank.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet

from hpo.results.reader import RunReader

FILE = Path(__file__).with_name("curves.parquet")
EPOCHS = 27


@dataclass(frozen=True)
class Curve:
    """One individual: its loss after each epoch, up to where it failed, if it did, and the seconds that one takes."""

    params: dict[str, Any]
    losses: npt.NDArray[np.float32]
    seconds: float


def load(search_space: str) -> list[Curve]:
    """Return the individuals of a search space, which were drawn at random."""
    rows = pyarrow.parquet.read_table(FILE).to_pylist()
    return [
        Curve(json.loads(row["params"]), np.array(row["losses"], np.float32), row["seconds"])
        for row in rows
        if row["search_space"] == search_space
    ]


def main() -> None:
    """Read runs, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+")
    rows = []
    for run_dir in parser.parse_args().run_dirs:
        run = RunReader(run_dir)
        for one in run.evaluations():
            assert one.state == "failed" or len(one.curve) == EPOCHS, one
            rows.append(
                {
                    "search_space": Path(run.manifest.search_space).stem,
                    "params": json.dumps(one.params),
                    "seconds": one.seconds / max(1, len(one.curve)),
                    "losses": [one.curve[epoch] for epoch in sorted(one.curve)],
                }
            )
    kinds = {"search_space": pyarrow.string(), "params": pyarrow.string()}
    schema = pyarrow.schema({**kinds, "seconds": pyarrow.float32(), "losses": pyarrow.list_(pyarrow.float32())})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), FILE, compression="zstd")
    print(f"{len(rows)} individuals, {FILE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
