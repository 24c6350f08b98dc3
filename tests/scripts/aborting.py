"""A script that aborts in several ways.

Most of them abort while Python exits, as threads of torch do.
"""

import argparse
import atexit
import ctypes
import os

parser = argparse.ArgumentParser()
parser.add_argument("--way")
way = parser.parse_args().way
is_first = os.environ["RANK"] == "0"


def terminate():
    """Call std::terminate. C++ does this when a thread that was not joined is destroyed."""
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


if is_first and way != "mute":
    print("val_loss=0.5")
if way == "bare":
    os.abort()
if way != "second" or not is_first:
    atexit.register(terminate)
if way == "raise":
    raise ValueError("injected")
