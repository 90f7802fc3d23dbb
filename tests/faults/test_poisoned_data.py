"""Poisoned data at known positions of the stream: each policy does with its step what it says."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.checkpoint import Keep, load_checkpoint, take_snapshot, write_snapshot
from pretrain.config import RunConfig, parse_run_config
from pretrain.data import SequenceDataset
from pretrain.sources import configured_phases, open_sources
from pretrain.spikes import MOST_IN_A_ROW
from pretrain.train import BAD_INPUT
from tests.distributed.launching import write_run
from tests.distributed.runs import run_steps, start
from tests.faults.runs import Process, same_state, start_ranks
from tests.ranks import run_ranks
from tokenizer.tokenizer import load_tokenizer
from tools.dataset_writer import DatasetWriter

BATCH, LENGTH = 4, 32
SPIKE = 44  # the step whose batch is poisoned
FIRST, END = (SPIKE - 1) * BATCH, SPIKE * BATCH  # its positions
STEPS = 48
SAVED = 34  # the last regular checkpoint before it, with losses enough to judge the next


def write_dataset(directory: Path, tokenizer: Path, poisoned: list[int]) -> None:
    """256 sequences that a model soon predicts, but for those in `poisoned`: pieces that nothing else holds, in no order."""
    tokens = np.resize(np.arange(100, 108, dtype="<u2"), (256, LENGTH))
    tokens[poisoned] = np.random.default_rng(0).integers(440, 512, (len(poisoned), LENGTH))
    with DatasetWriter(directory, load_tokenizer(tokenizer), source="text", block_tokens=8192, shard_tokens=8192) as writer:
        writer.begin({}, [])
        writer.splits["train"].add(np.append(tokens, tokens[0, :1]), tokens.size)
        writer.splits["validation"].add(tokens[:2].flatten(), 2 * LENGTH)
        writer.finish({})


def options(folder: Path, dataset: Path, *more: str) -> list[str]:
    small = [*write_run(folder, dataset), "--schedule.total_tokens", str(STEPS * BATCH * LENGTH), "--schedule.learning_rate", "0.01"]
    return [*small, "--eval.every_steps", "1000", "--optim.spike_threshold", "2", *more]


def read_config(command: list[str]) -> RunConfig:
    at = command.index("--ds_config")
    return parse_run_config(command[:at] + command[at + 2 :])


def poisoned_dataset(folder: Path, tokenizer: Path, end: int) -> Path:
    """Whose stream is poisoned at the positions [FIRST, end)."""
    write_dataset(folder / "clean", tokenizer, [])
    config = read_config(options(folder, folder / "clean"))
    sources = open_sources(config.data)
    stream = SequenceDataset(config.data, sources, configured_phases(config.data, sources), config.seed)
    write_dataset(folder / "poisoned", tokenizer, stream.locate(np.arange(FIRST, end))[2].tolist())
    return folder / "poisoned"


@pytest.fixture(scope="module")
def poisoned(tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisoned_dataset(tmp_path_factory.mktemp("poisoned"), tokenizer_directory, END)


def rows(folder: Path, key: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoints" / f"step_{step:08d}"


@pytest.mark.parametrize("policy", ["log", "skip"])
def test_a_spike_is_said_and_its_step_left_out_only_with_skip(poisoned: Path, tmp_path: Path, policy: str) -> None:
    more = ["--optim.spike_policy", policy, "--checkpoint.every_steps", "1000", "--log.digest_every_steps", "1"]
    assert Process(options(tmp_path, poisoned, *more), tmp_path / "output").end() == 0
    (spike,) = rows(tmp_path, "spike_loss")
    assert spike["step"] == SPIKE and spike["spike_loss"] > 5
    assert (spike["spike_first_position"], spike["spike_end_position"]) == (FIRST, END)
    starts_from = {row["step"]: row["weights_digest"] for row in rows(tmp_path, "weights_digest")}
    assert (starts_from[SPIKE] == starts_from[SPIKE + 1]) == (policy == "skip")
    assert len(set(starts_from.values())) == STEPS - (policy == "skip")


def from_checkpoint(command: list[str], saved: Path, folder: Path) -> None:
    """In a rank: the steps after SPIKE, from the weights of `saved`. Leaves the last one's state in `folder`."""
    config = read_config(command)
    engine = start(config)
    load_checkpoint(engine, saved)
    run_steps(engine, config, STEPS - SPIKE, first_step=SPIKE)
    write_snapshot(take_snapshot(engine, {"step": STEPS}, {}, {}), folder, Keep())


def test_a_rollback_puts_back_the_last_checkpoint_and_moves_past_the_spike_also_in_an_interrupted_run(
    poisoned: Path, tmp_path: Path
) -> None:
    command = options(tmp_path, poisoned, "--optim.spike_policy", "rollback", "--checkpoint.every_steps", str(SAVED))
    process = Process(command, tmp_path / "output")
    process.wait_for("step 35/")
    process.process.send_signal(signal.SIGUSR1)  # leaves a checkpoint between the regular ones
    process.end()
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert len(saved) == 2 and saved[0] == "step_00000034" < saved[1] < checkpoint(tmp_path, SPIKE).name

    assert Process(command, tmp_path / "output").end() == 0
    (back,) = rows(tmp_path, "rollback_to")
    assert back["step"] == SPIKE and back["rollback_to"] == "step_00000034"
    assert (back["rollback_first_position"], back["rollback_end_position"]) == (SAVED * BATCH, END)

    run_ranks(from_checkpoint, 1, command, checkpoint(tmp_path, SAVED), tmp_path / "expected")
    assert same_state(checkpoint(tmp_path, STEPS), tmp_path / "expected" / f"step_{STEPS:08d}")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_whose_data_stay_bad_ends_with_evidence_and_is_not_to_be_started_again(
    tokenizer_directory: Path, tmp_path: Path, policy: str
) -> None:
    dataset = poisoned_dataset(tmp_path, tokenizer_directory, FIRST + MOST_IN_A_ROW * BATCH)
    command = options(tmp_path / policy, dataset, "--optim.spike_policy", policy, "--checkpoint.every_steps", str(SAVED))
    ranks = start_ranks([*command, "--schedule.total_tokens", str(90 * BATCH * LENGTH)], tmp_path)
    assert [rank.end() for rank in ranks] == [BAD_INPUT] * 2
    last, why = {
        "skip": (SPIKE + MOST_IN_A_ROW - 1, "20 steps in a row changed nothing"),
        "rollback": (SPIKE + 3, f"4 spikes since the checkpoint of step {SAVED}, 3 of them rolled back"),
    }[policy]
    (error,) = [line for rank in ranks for line in rank.text.splitlines() if line.startswith("error")]
    assert f"{why}, up to step {last}: " in error and f"evidence/step_{last:08d}.json" in error
    evidence = json.loads((tmp_path / policy / "run" / "evidence" / f"step_{last:08d}.json").read_text())
    batches = evidence["micro_batches"]
    assert sorted(position for batch in batches for position in batch["positions"]) == list(range((last - 1) * BATCH, last * BATCH))
    assert all(batch["loss"] > 5 for batch in batches)
    assert checkpoint(tmp_path / policy, SAVED).exists()
