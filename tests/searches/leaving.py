"""A search whose evaluations leave a thread, a child or something else, in turn."""

import os
import subprocess
import sys
import threading
import time

import torch.distributed as dist

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 5))
WAYS = ["nothing", "thread", "child", "group", "settings", "daemon"]
kept: list[object] = []


def leave(way):
    if way == "thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    elif way == "child":
        kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
    elif way == "group":
        kept.append(dist.new_group([0]))
    elif way == "settings":  # which are put back
        os.environ["LEFT"] = "1"
        os.chdir("/")
    elif way == "daemon":  # its parent ends at once
        subprocess.Popen(["sh", "-c", "sleep 3607 &"], start_new_session=True).wait()


def objective(params, worker):
    way = WAYS[params["k"]]
    assert "LEFT" not in os.environ
    print(f"way {way} process {os.getpid()} folder {os.getcwd()}")  # noqa: PTH109
    os.write(1, b"native code\n")
    subprocess.run(["echo", "a child"], check=True)
    os.write(2, b"\r10%\r99%\n")
    leave(way)
    return float(worker.rank * 0 + params["k"])
