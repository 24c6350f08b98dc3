"""A script with things that ordinary scripts do.

It prints or reports a loss as it would do without a search.
"""

import argparse
import atexit
import dataclasses
import inspect
import logging
import multiprocessing
import os
import sys
import threading

import torch

import hpo


@dataclasses.dataclass
class Config:
    way: str = ""


class Box:
    def __init__(self, value):
        self.value = value


def main():  # noqa: C901 - a case for each way
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name}", type=field.type)  # a type, and no text of one
    config = Config(**vars(parser.parse_args()))
    way = config.way
    if way == "types":
        print("val_loss=1.0")
    elif way == "\d":  # noqa: W605 - Python warns of it, and it is the script that shows this
        print("val_loss=7.0")
    elif way == "logging":
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
        logging.getLogger("train").info("val_loss=1.0")
    elif way == "atexit":
        atexit.register(print, "val_loss=1.0")
    elif way == "thread":
        threading.Timer(0.3, print, ["val_loss=1.0"]).start()
    elif way == "file":
        file = open(f"file-{os.environ['RANK']}", "w")  # noqa: PTH123, SIM115
        file.write("written")
        globals()["kept"] = file
        print("val_loss=1.0")
    elif way == "source":
        print("val_loss=1.0" if "class Box" in inspect.getsource(Box) else "val_loss=2.0")
    elif way == "spawn":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(f"val_loss={pool.map(Box, [1.0])[0].value}")
    elif way == "seeds":
        print(f"drawn {torch.rand(1).item()}\nval_loss=1.0")
    elif way == "call":
        hpo.report(1.0)
        print("val_loss=7.0")
    elif way == "comma":
        print("val_loss=1.0, acc=3")
    elif way == "exit":
        print("val_loss=1.0")
        os._exit(0)
    elif way == "late" and os.environ["RANK"] == "1":
        hpo.report(1.0)
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
