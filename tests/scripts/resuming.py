"""A script that resumes by a mode and a folder, or by the path of its newest checkpoint."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float, default=1.0)
parser.add_argument("--out", type=Path, default=Path())
parser.add_argument("--mode", default="scratch")
parser.add_argument("--load", type=Path)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--seconds", type=float, default=0.1, help="of the second epoch")
parser.add_argument("--forgets", action="store_true")
parser.add_argument("--waits", type=Path, help="after 2 epochs, until this file exists")
parser.add_argument("--saves", type=int, default=1, help="the first epoch with a checkpoint")
args = parser.parse_args()

if args.mode not in ("scratch", "resume"):
    sys.exit(f"--mode: invalid choice {args.mode}")
path = args.load or (args.out if args.mode == "resume" else None)
epoch, loss = 0, 8.0 + args.x
if path is not None:
    epoch, loss = json.loads((path / "state.json").read_text())
if args.forgets:
    loss = 8.0 + args.x
while epoch < args.epochs:
    if epoch == 1 and path is None:
        time.sleep(args.seconds)
    epoch += 1
    loss /= 2
    if os.environ["RANK"] == "0":
        for folder in (args.out, args.out / f"checkpoint-{epoch}"):
            if epoch >= args.saves:
                folder.mkdir(exist_ok=True)
                (folder / "state.json").write_text(json.dumps([epoch, loss]))
        print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
    while args.waits and epoch == 2 and not args.waits.exists():
        time.sleep(0.1)
