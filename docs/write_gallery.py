"""Run the searches of the gallery, and write its pages into docs/gallery.

    python docs/write_gallery.py

`make docs` does so at each build. The scripts are listings of other pages, so they run as they are
written there. A search that fails ends the build with its output.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import hpo
from tests.support import docs

DOCS = Path(__file__).parent
GALLERY = DOCS / "gallery"
PLOTLY = "../plotly.min.js"  # conf.py adds it to the site
SECONDS = 900  # time limit of a search, for slow machines


@dataclass(frozen=True)
class Example:
    """A script of a page, a command that searches it in `runs/NAME`, and a figure of the run."""

    name: str
    title: str
    shows: str
    page: str
    script: str
    command: str
    figure: str


EXAMPLES = (
    Example(
        "ddp",
        "DDP from scratch",
        "An objective with a training loop of its own, in DistributedDataParallel, on two ranks.",
        "training/own-model.md",
        "my_search.py",
        "mpirun -n 4 hpo search my_search.py --set epochs=3 --evaluations 16 --run-dir runs/ddp",
        "history",
    ),
    Example(
        "torchrun",
        "A script for torchrun",
        "A script that torchrun starts, unchanged. The search takes its ranks, and reads its loss.",
        "training/scripts.md",
        "train.py",
        r"""mpirun -n 4 hpo search --space 'lr=Float(1e-3, 1e-1, log=True)' \
    --space 'hidden=Int(16, 256, log=True)' --loss 'val_loss=(\S+)' --evaluations 16 \
    --run-dir runs/torchrun -- torchrun --nproc_per_node=2 train.py --epochs 3""",
        "parallel",
    ),
    Example(
        "hydra",
        "A Hydra application",
        "A sweep by Hydra's own command line, with four jobs at a time, none of which waits.",
        "training/hydra.md",
        "train.py",
        r"""python train.py --multirun hydra/sweeper=hpo hydra.sweeper.workers=4 \
    hydra.sweeper.evaluations=16 hydra.sweep.dir=runs/hydra \
    'lr=tag(log,interval(1e-4,1e-1))' 'width=range(8,129,8)'""",
        "slice lr",
    ),
    Example(
        "lightning",
        "Lightning",
        "A LightningModule, whose Trainer runs on the ranks of a worker.",
        "training/frameworks.md",
        "my_trainer.py",
        "mpirun -n 4 hpo search my_trainer.py --evaluations 8 --run-dir runs/lightning",
        "curves",
    ),
    Example(
        "trainer",
        "The Trainer of transformers",
        "A vision transformer with Hugging Face's Trainer. ASHA stops bad trials early.",
        "training/frameworks.md",
        "train.py",
        r"""mpirun -n 4 hpo search --space 'learning_rate=Float(1e-4, 1e-1, log=True)' \
    --pruner asha --evaluations 8 --run-dir runs/trainer -- train.py --output_dir '{folder}' \
    --use_cpu --per_device_train_batch_size 32 --eval_strategy epoch --save_strategy no \
    --report_to none --disable_tqdm true""",
        "rungs",
    ),
    Example(
        "fsdp",
        "FSDP",
        "A transformer whose parameters are sharded over the ranks of its worker.",
        "training/fsdp.md",
        "my_sharded.py",
        "mpirun -n 4 hpo search my_sharded.py --evaluations 8 --run-dir runs/fsdp",
        "timeline",
    ),
    Example(
        "asking",
        "Ask and tell",
        "A loop of your own, in a notebook or a job array, without MPI.",
        "search/ask-and-tell.md",
        "my_asking.py",
        "python my_asking.py\nhpo top runs/asking",
        "slice lr",
    ),
    Example(
        "front",
        "Two objectives",
        "Small loss and few parameters: the Pareto front of a run.",
        "search/several-objectives.md",
        "my_front.py",
        "mpirun -n 4 hpo search my_front.py --evaluations 16 --run-dir runs/front",
        "front parameters",
    ),
)


def main() -> None:
    """Run all examples, and write their pages and the page that lists them."""
    shutil.rmtree(GALLERY, ignore_errors=True)
    GALLERY.mkdir()
    for example in EXAMPLES:
        (GALLERY / f"{example.name}.md").write_text(make_page(example), "utf-8")
    (GALLERY / "index.md").write_text(make_index(), "utf-8")


def make_page(example: Example) -> str:
    """Run an example in an empty folder. Return its page: script, command, output and figure."""
    script = read_listing(example)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, example.script).write_text(script, "utf-8")
        output = run_command(example.command, folder).replace(f"{folder}/", "")
        figure = hpo.load_run(Path(folder, "runs", example.name)).figures[example.figure]
    drawn = figure.to_html(full_html=False, include_plotlyjs=PLOTLY)
    return f"""# {example.title}

{example.shows} See also: [the page about it](../{example.page}).

`{example.script}`:

```python
{script}```

```bash
{example.command}
```

```text
{output}```

```{{raw}} html
{drawn}
```
"""


def read_listing(example: Example) -> str:
    """Return the listing of a page that users should save as the script."""
    if example.page == "training/own-model.md":  # It includes the listing of the README.
        return docs.blocks("README.md", "python")[0]
    return docs.example(f"docs/{example.page}", example.script)


def run_command(command: str, folder: str) -> str:
    """Run a command in a folder, and return what it prints; exit with that if it fails."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-euc", command],  # noqa: S607
        cwd=folder,
        env={**os.environ, "PATH": programs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    if ended.returncode != 0:
        sys.exit(f"{ended.stdout}\n{command}\nended with status {ended.returncode}")
    return ended.stdout


def make_index() -> str:
    """Return the page that lists all examples."""
    rows = [f"| [{each.title}]({each.name}.md) | {each.shows} |" for each in EXAMPLES]
    names = [each.name for each in EXAMPLES]
    return "\n".join(
        [
            "# Gallery",
            "",
            "Complete small searches, each with its script, its command, its output and a figure.",
            "They ran on CPUs when this documentation was built.",
            "",
            "| example | shows |",
            "|---|---|",
            *rows,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *names,
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
