"""A Hydra application, as Hydra's documentation shows it, that trains on the ranks of torchrun."""

import os

import hydra
import torch
import torch.distributed as dist

import hpo


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    size = int(os.environ["WORLD_SIZE"])
    total = torch.tensor(cfg.lr, dtype=torch.float64)
    if size > 1:
        dist.init_process_group("gloo")
        dist.all_reduce(total)
    assert float(total) / size == cfg.lr, "the ranks have other values"
    if cfg.optimizer.layers > 6:
        raise ValueError("too many layers")
    loss = abs(cfg.lr - 0.01) + cfg.optimizer.layers + (cfg.optimizer.name == "sgd")
    for epoch in range(cfg.epochs):
        hpo.report(loss + 1 / (epoch + 1))
    return loss, {"ranks": size}


if __name__ == "__main__":
    main()
