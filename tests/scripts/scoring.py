"""A script that prints an accuracy, and no loss. The best learning rate is 0.7."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
accuracy = 100 * (1 - (parser.parse_args().lr - 0.7) ** 2)
print(f" * Acc@1 {accuracy:.3f} Acc@5 100.000")
