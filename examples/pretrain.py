"""Pretrains a small DeepSeek-V3-shaped language model over bytes, with expert parallelism, from one YAML file.

    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --config configs/tiny_cpu.yaml
    python examples/pretrain.py --config configs/tiny_cpu.yaml                       # one rank, no launcher
    ... --resume                                  # continue this run from its latest checkpoint
    ... --resume runs/other/checkpoints/step_000200   # from any checkpoint, saved at any EP size
    ... --set train.steps=50 --set moe.ep.size=1      # change single settings

The same command trains on GPUs where there are some. All settings are in the YAML file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from pretraining import data, plot
from pretraining.ranks import Ranks, choose_device, start_ranks, stop_ranks, world_size
from pretraining.report import Display, load_over, print_summary, warn
from pretraining.run_folder import RunFolder
from pretraining.trainer import Trainer, check_batch

from moe_ep import ConfigError, EPTimeoutError, load_config
from moe_ep.config import Config, ModelConfig, TrainConfig


def main(arguments: list[str]) -> int:
    """Runs the command; 0 when it went well, 2 for a wrong setting, 1 for a rank that did not come."""
    options = _parse(arguments)
    try:
        config, model, train = _load(options.config, options.set)
        device = choose_device(train.device)
        folder = RunFolder(Path(train.run_dir))
        checkpoint = None if options.resume is None else folder.find_checkpoint(options.resume)
    except ConfigError as error:
        warn(str(error))
        return 2
    ranks = start_ranks(device, config.moe.ep.size, config.moe.ep.timeout_secs)
    starts_anew = checkpoint is None or not folder.owns(checkpoint)
    try:
        # All that can be refused comes before anything of an earlier run is touched.
        corpus = _corpus(folder.data_before(starts_anew), train.seq_len, ranks)
        trainer = Trainer(config.moe, model, train, ranks, corpus)
        first_step = 0 if checkpoint is None else _resume(trainer, checkpoint)
        trainer.try_out()
        _begin(folder, starts_anew, first_step, ranks)
        _train(trainer, folder, first_step)
    except ConfigError as error:
        warn(str(error))
        with contextlib.suppress(RuntimeError):  # all ranks see this: nobody leaves while another still connects
            ranks.barrier()
        if ranks.rank == 0:
            folder.drop_new_data()
        return 2
    except EPTimeoutError as error:
        warn(f"rank {ranks.rank}: {error}")
        return 1
    trainer.model.buffer.close()
    stop_ranks(ranks)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a small MoE language model with expert parallelism.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML with the sections moe, model and train")
    parser.add_argument(
        "--resume", nargs="?", const="latest", metavar="PATH", help="continue from a checkpoint (default: the latest)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one setting; repeatable"
    )
    return parser.parse_args(arguments)


def _load(path: str, pairs: list[str]) -> tuple[Config, ModelConfig, TrainConfig]:
    """The configuration, with what the example needs beyond the schema checked too."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {pair} has no value; write --set KEY=VALUE, e.g. --set train.steps=50.")
        overrides[key] = value
    config = load_config(path, overrides)
    for name in ("model", "train"):
        if getattr(config, name) is None:
            raise ConfigError(f"{path} has no section {name}, which pretraining needs; see configs/tiny_cpu.yaml.")
    assert config.model is not None
    assert config.train is not None
    if config.model.vocab_size < 256:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, but the tokens are bytes; set it to at least 256."
        )
    check_batch(config.train, world_size())
    return config, config.model, config.train


def _corpus(folder: Path, seq_len: int, ranks: Ranks) -> data.Corpus:
    """Rank 0 writes the data where they are missing; the others wait."""
    if ranks.rank == 0:
        data.write_corpus(folder)
    ranks.barrier()
    return data.open_corpus(folder, seq_len)


def _resume(trainer: Trainer, checkpoint: Path) -> int:
    """Loads the checkpoint; the number of steps that it had done."""
    extra = trainer.load(checkpoint)
    step = int(extra["step"])
    if trainer.ranks.rank == 0:
        print(f"continuing after step {step} from {checkpoint}", flush=True)
        if extra["data"] != trainer.corpus.fingerprint():
            warn("The text differs from the one that the checkpoint was trained on: another version of Python.")
    return step


def _begin(folder: RunFolder, starts_anew: bool, first_step: int, ranks: Ranks) -> None:
    """Rank 0 makes the folder, once all ranks have what they need of an earlier one; the others wait."""
    ranks.barrier()
    if ranks.rank == 0:
        if starts_anew:
            aside = folder.start_anew()
            if aside is not None:
                warn(f"{folder.root} held a run, which is now {aside}.")
        else:
            folder.forget_after(first_step)
    ranks.barrier()


def _train(trainer: Trainer, folder: RunFolder, first_step: int) -> None:
    """Trains up to the last step, then prints, draws and stores what came out."""
    began = time.monotonic()
    train_secs = _steps(trainer, folder, first_step)
    _finish(trainer, folder, trainer.train_config.steps - first_step, train_secs, time.monotonic() - began)


def _steps(trainer: Trainer, folder: RunFolder, first_step: int) -> float:
    """Steps, records, evaluations and checkpoints up to the last step; the seconds spent in steps alone."""
    train, main_rank = trainer.train_config, trainer.ranks.rank == 0
    tokens = train.global_batch_size * train.seq_len
    train_secs, secs, steps = 0.0, 0.0, 0  # of all steps; of the steps since the last record; their number
    with Display(main_rank, first_step, train.steps) as display:
        for step in range(first_step + 1, train.steps + 1):
            began = time.monotonic()
            result = trainer.step(step)
            secs, steps = secs + time.monotonic() - began, steps + 1
            last = step == train.steps
            evaluate = last or step % train.eval_every == 0
            if evaluate or step == 1 or step % train.log_every == 0:
                record = {"step": step, **trainer.metrics(result), "tokens_per_sec": tokens * steps / secs}
                if evaluate:
                    record["val_loss"] = trainer.validation_loss()
                train_secs, secs, steps = train_secs + secs, 0.0, 0
                if main_rank:
                    folder.append(record)
                display.show(record)
            display.advance(step)
            if last or step % train.checkpoint_every == 0:
                _save(trainer, folder, step)
    return train_secs


def _save(trainer: Trainer, folder: RunFolder, step: int) -> None:
    ranks = trainer.ranks
    partial = folder.begin_checkpoint(step) if ranks.rank == 0 else folder.partial(step)
    ranks.barrier()
    trainer.save(partial, step)
    ranks.barrier()
    if ranks.rank == 0:
        folder.finish_checkpoint(step)


def _finish(trainer: Trainer, folder: RunFolder, num_steps: int, train_secs: float, seconds: float) -> None:
    """The last evaluation, the summary and the picture."""
    train = trainer.train_config
    validation = trainer.validation_loss()
    with trainer.without_routed_experts():
        zeroed = trainer.validation_loss()
    if trainer.ranks.rank != 0:
        return
    records = folder.records()
    table = data.BigramTable(trainer.corpus.train)
    batches = [data.windows(trainer.corpus.validation, b, train.seq_len) for b in trainer.validation_batches()]
    bigram = sum(table.loss(inputs, targets) for inputs, targets in batches) / len(batches)
    drawn = plot.draw(records, bigram, folder.picture)
    summary: dict[str, Any] = {
        "val_loss": validation,
        "bigram_loss": bigram,
        "val_loss_without_routed_experts": zeroed,
        "max_over_mean_load": load_over(records, train.steps),
        "tokens_per_sec": num_steps * train.global_batch_size * train.seq_len / train_secs if train_secs else 0.0,
        "seconds": seconds,
        "num_ranks": trainer.ranks.num_ranks,
        "run_dir": str(folder.root),
        "picture": str(folder.picture) if drawn else "not drawn: install matplotlib (pip install matplotlib)",
    }
    folder.summary.write_text(json.dumps(summary, indent=2) + "\n")
    print_summary(summary)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
