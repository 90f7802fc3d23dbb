"""From YAML and the command line to a RunConfig; what is wrong is named in one message."""

from pathlib import Path

import pytest
import yaml

from pretrain.config import RunConfig, parse_arguments
from pretrain.sources import SourceConfig, WeightChange
from tests.ranks import REPOSITORY

YAML = """
run_dir: runs/x
model: {vocab_size: 512, hidden_size: 32, num_heads: 2, max_depth: 2, max_positions: 64}
data: {path: some/data, sequence_length: 32}
schedule: {total_tokens: 4096, learning_rate: 1e-3, min_learning_rate: 1.0e-4}
optim: {global_batch_size: 8, precision: fp32}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return path


def parse(config_file: Path, *overrides: str) -> RunConfig:
    return parse_arguments(["--config", str(config_file), "--ds_config", "ds.json", *overrides])[0]


def test_yaml_fills_the_sections_and_defaults_fill_the_rest(config_file: Path) -> None:
    config, ds_config = parse_arguments(["--config", str(config_file), "--ds_config", "ds.json"])
    assert (config.run_dir, config.data.path, ds_config) == (Path("runs/x"), "some/data", Path("ds.json"))
    assert (config.model.hidden_size, config.optim.precision, config.optim.beta2) == (32, "fp32", 0.95)
    assert (config.schedule.learning_rate, config.schedule.min_learning_rate) == (1e-3, 1e-4)  # also without YAML's decimal point
    assert config.tokens_per_step == 256


def test_the_command_line_wins_over_yaml(config_file: Path) -> None:
    config = parse(config_file, "--model.hidden_size", "64", "--checkpoint.allow_change", '["schedule", "seed"]', "--eval.depths=[3]")
    assert (config.model.hidden_size, config.model.num_heads) == (64, 2)
    assert config.checkpoint.allow_change == ["schedule", "seed"]
    assert config.evaluation_depths == [0, 1, 2, 3]


def test_a_dense_model_is_evaluated_at_depth_0_only(config_file: Path) -> None:
    dense = ("--model.core_blocks", "0", "--model.max_depth", "0", "--model.min_depth", "0")
    assert parse(config_file, *dense, "--eval.depths=[3]").evaluation_depths == [0]


def test_the_deepspeed_launchers_local_rank_is_accepted(config_file: Path) -> None:
    assert parse(config_file, "--local_rank=1") == parse(config_file)


def test_the_saved_config_is_a_config_file(config_file: Path, tmp_path: Path) -> None:
    config = parse(config_file, "--checkpoint.keep", "3", "--optim.eps", "1e-7", "--eval.max_sequences", "null")
    saved = tmp_path / "config.yaml"
    saved.write_text(yaml.safe_dump(config.as_dict(), sort_keys=False))
    assert parse(saved) == config


def test_print_config_shows_every_setting_and_ends(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(config_file, "--seed", "7", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert ended.value.code == 0
    assert (printed["seed"], printed["model"]["hidden_size"], printed["log"]["every_steps"]) == (7, 32, 10)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_we_ship_are_valid(path: Path) -> None:
    assert parse(path).schedule.total_tokens > 0


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("--model.num_head=2", "unrecognized arguments: --model.num_head=2"),  # argparse would take it for num_heads
        ("--modell.num_heads=2", "unrecognized arguments: --modell.num_heads=2"),
        ("--model.hidden_size=wide", "\"model.hidden_size\": Expected a <class 'int'>. Got value: wide"),
        ("--optim.precision=fp16", "\"optim.precision\": Expected a typing.Literal['bf16', 'fp32']. Got value: fp16"),
        ("--model.hidden_size=33", "model.num_heads is 2; it must be a divisor of hidden_size 33."),
        ("--model.max_depth=0", "model.max_depth is 0; it must be at least 1 when there is a core."),
        ("--data.sequence_length=65", "data.sequence_length is 65; it must be at most model.max_positions 64."),
        ("--data.path=null", "data: give either path, or sources, each with a path of its own; the config and command line give neither"),
        ("--data.workers=-1", "data.workers is -1, but must be at least 0"),
        ("--optim.beta2=1", "optim.beta2 is 1.0; it must be at least 0 and below 1."),
        ("--optim.eps=0", "optim.eps is 0.0; it must be above 0."),
        ("--optim.weight_decay=nan", "\"optim.weight_decay\": Expected a <class 'float'>. Got value: nan"),
        ("--optim.global_batch_size=0", "optim.global_batch_size is 0; it must be at least 1."),
        ("--optim.initial_batch_size=4", "optim.initial_batch_size and optim.ramp_tokens make a ramp together"),
        (
            "--optim={initial_batch_size: 3, ramp_tokens: 9}",
            "optim.initial_batch_size is 3; it must be a divisor of optim.global_batch_size",
        ),
        ("--optim={initial_batch_size: 4, ramp_tokens: 0}", "optim.ramp_tokens is 0; it must be at least 1."),
        ("--log.digest_every_steps=0", "log.digest_every_steps is 0; it must be at least 1."),
        ("--parallel.micro_batch_size=0", "parallel.micro_batch_size is 0; it must be at least 1."),
        ("--parallel.tensor_parallel=3", "parallel.tensor_parallel is 3, which does not divide the model's num_heads (2)."),
        ("--checkpoint.keep=0", "checkpoint.keep is 0; it must be at least 1, or null to keep all."),
        ("--checkpoint.every_steps=0", "checkpoint.every_steps is 0; it must be at least 1."),
        ("--eval.depths=[1, -1]", "eval.depths is [1, -1]; it must be numbers from 0, or null."),
        ("--log.every_steps=0", "log.every_steps is 0; it must be at least 1."),
        ("--seed=-1", "seed is -1; it must be from 0 to 2^63 - 1."),
        ("--config=absent.yaml", "File does not exist"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(config_file: Path, override: str, named: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(config_file, override)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("yaml_text", "named"),
    [
        (YAML + "modell: {num_heads: 2}\n", "Option 'modell.num_heads' is not accepted"),
        (YAML.replace("num_heads", "num_head"), "Group 'model' does not accept option 'num_head'"),
        (YAML.replace("sequence_length: 32", ""), "required: data.sequence_length"),
        (YAML + "seed: [\n", "Problems parsing config"),
        ("", "Unexpected config"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(config_file: Path, yaml_text: str, named: str) -> None:
    config_file.write_text(yaml_text)
    with pytest.raises(ValueError) as refused:
        parse(config_file)
    assert named in str(refused.value)
    assert "`train.py --help` lists the settings" in str(refused.value)


def test_processes_and_batches_that_do_not_divide_are_named(config_file: Path) -> None:
    config = parse(config_file, "--parallel.tensor_parallel", "2", "--parallel.micro_batch_size", "2")
    assert (config.data_parallel_size(4), config.accumulation_steps(2)) == (2, 2)
    with pytest.raises(ValueError, match="parallel.tensor_parallel is 2, which does not divide the 3 processes.*multiple of 2"):
        config.data_parallel_size(3)
    with pytest.raises(ValueError, match="optim.global_batch_size is 8, .*micro_batch_size 2 times 3 data-parallel ranks"):
        config.accumulation_steps(3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--parallel.core_residency", "every_use", "--model.min_depth", "0"), "every_use cannot train at depth 0"),
        (("--parallel.sequence_parallel", "true"), "parallel.tensor_parallel is 1: there is nothing to split"),
        (("--parallel.tensor_parallel", "2", "--data.sequence_length", "31"), "data.sequence_length is 31; it must be a multiple of the 2"),
        (("--compute.keep_last", "1"), "compute.keep_last needs compute.checkpointing recurrence or nested"),
        (("--model.backprop_depth", "0"), "model.backprop_depth is 0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_together_are_refused(config_file: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(config_file, *overrides)


def test_sequence_parallelism_comes_with_tensor_parallelism(config_file: Path) -> None:
    assert not parse(config_file).parallel.splits_sequence
    assert parse(config_file, "--parallel.tensor_parallel", "2").parallel.splits_sequence
    off = ("--parallel.tensor_parallel", "2", "--parallel.sequence_parallel", "false")
    assert not parse(config_file, *off).parallel.splits_sequence


def test_a_batch_ramp_rises_in_equal_steps_to_the_global_batch(config_file: Path) -> None:
    config = parse(config_file, "--optim.initial_batch_size=2", "--optim.ramp_tokens=960")  # 30 sequences of 32 tokens
    assert [config.batch_size(position) for position in (0, 9, 10, 19, 20, 29, 30, 10**9)] == [2, 2, 4, 4, 6, 6, 8, 8]
    with pytest.raises(ValueError, match="optim.initial_batch_size is 2, which is not a multiple of .* 4 data-parallel ranks"):
        config.accumulation_steps(4)
    assert {parse(config_file).batch_size(position) for position in (0, 10, 10**9)} == {8}


def test_the_command_line_wins_over_a_config_that_follows_it(config_file: Path) -> None:
    for config in (["--config", str(config_file)], [f"--config={config_file}"]):
        parsed, _ = parse_arguments(["--run_dir", "runs/other", "--optim.beta2", "0.9", *config, "--ds_config", "ds.json"])
        assert (parsed.run_dir, parsed.optim.beta2, parsed.model.hidden_size) == (Path("runs/other"), 0.9, 32)


def test_a_mixture_can_be_given_in_yaml(config_file: Path) -> None:
    sources = "sources: {web: {path: data/web, weight: 0.7}, code: {path: s3://bucket/code, weight: 0.3, epochs: 4}}"
    config_file.write_text(YAML.replace("path: some/data", sources))
    config = parse(config_file, '--data.weight_changes=[{"from_tokens": 4096, "weights": {"web": 1, "code": 3}}]')
    assert config.data.sources["code"] == SourceConfig("s3://bucket/code", weight=0.3, epochs=4)
    assert config.data.weight_changes == [WeightChange(4096, {"web": 1, "code": 3})]
    written = yaml.safe_load(yaml.safe_dump(config.as_dict()))["data"]["sources"]
    assert written == {
        name: {"path": source.path, "weight": source.weight, "epochs": source.epochs} for name, source in config.data.sources.items()
    }
