"""Train a small language model with transformers' Trainer, started by torchrun."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


def make_samples(count, generator):
    """Return sequences of tokens that count up from a random token. So a model can learn them."""
    start = torch.randint(32, (count, 1), generator=generator)
    return [{"input_ids": tokens, "labels": tokens} for tokens in (start + torch.arange(8)) % 32]


def main():
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    generator = torch.Generator().manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=make_samples(256, generator),
        eval_dataset=make_samples(64, generator),
    )
    trainer.train()


if __name__ == "__main__":
    main()
