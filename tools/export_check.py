"""Reloads an exported directory with `transformers` and compares it with the training model: keys, logits, cache, tokenizer.

Part of `convert_to_hf.py`. The comparison is in fp32 on the CPU whatever the exported dtype: the training model then gets the rounded
weights, so that what is compared is the arithmetic, and the tolerance need not hide a mistake. One model is in memory at a time.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import GRTConfig
from tokenizer.tokenizer import Tokenizer

LOGIT_TOLERANCE = 1e-5  # of the largest logit
NEW_TOKENS = 8  # generated at every depth, with and without the cache
TIE = 1e-4  # cached and uncached products round differently: closer logits than this may change places

EDGE_CASES = (
    "",
    " ",
    "   leading and  double  spaces ",
    "tabs\tand\nnewlines\n\n\nand\r\nreturns",
    "def f(x):\n        return x  # indented\n",
    "digits 1234567890 3.14e-10",
    "The quick brown fox's don't, it's; (parentheses) [brackets] {braces} <angles>",
    "Grüße, naïve café, Ελληνικά, русский, 日本語, العربية, हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 and a combining e\u0301",
    "\ufb01 ligature, \u00a0 no-break space, \u200b zero width, \ufeff mark",
    "<|endoftext|> <|pad|> <s> </s> <unk> <0x0A> [INST]",
    "nul \x00 and bell \x07",
)


class ExportError(Exception):
    """An export that cannot be made, or is not the training model; the message is for a person."""


def check_export(directory: Path, config: GRTConfig, tokenizer: Tokenizer, read: Callable[[str], Tensor]) -> None:
    """Raises ExportError unless `directory`, loaded by transformers, is the trained model and its tokenizer.

    `read` returns a parameter of the training model by name, rounded to the dtype it was exported in.
    """
    check_tokenizer(directory, tokenizer)
    tokens = torch.randint(config.vocab_size, (2, min(config.max_positions, 40)), generator=torch.Generator().manual_seed(0))
    tokens[0, :2] = torch.tensor([0, config.vocab_size - 1])  # the ends of the vocabulary
    depths = sorted({0, 1, config.max_depth, 2 * config.max_depth}) if config.core_blocks else [0]
    with torch.inference_mode():
        expected = training_logits(read, config, tokens, depths)
        model = load_export(directory, config)
        check_logits(model, tokens, expected)
        check_cache(model, tokens, depths)


def load_export(directory: Path, config: GRTConfig) -> Any:
    """The exported model in fp32, after a check that every weight was in the files and found its place."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    model, loading = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[problem]:
            raise ExportError(f"The exported weights do not fit the exported code: {problem} {sorted(loading[problem])}.")
    if model.num_parameters() != config.parameter_count:
        raise ExportError(f"The exported model has {model.num_parameters():,} parameters, its config {config.parameter_count:,}.")
    return model.eval()


def training_logits(read: Callable[[str], Tensor], config: GRTConfig, tokens: Tensor, depths: list[int]) -> dict[int, Tensor]:
    """Logits `[B, S, V]` of the training model by depth, fp32."""
    from model.grt import GRT
    from model.parallel import layer_config

    with single_process_group():
        model = GRT(config, layer_config(1, torch.float32), seed=0)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(read(name))
        return {depth: model(tokens, depth=depth)[0].transpose(0, 1)[..., : config.vocab_size].clone() for depth in depths}


@contextlib.contextmanager
def single_process_group() -> Iterator[None]:
    """The process groups that the training model's layers expect, in this one process and without a port."""
    from megatron.core import parallel_state

    from model.parallel import initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            initialize_model_parallel(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def check_logits(model: Any, tokens: Tensor, expected: dict[int, Tensor]) -> None:
    """Compares the logits at every depth with the training model's."""
    for depth, logits in expected.items():
        error = float((model(tokens, num_steps=depth).logits - logits).abs().max() / logits.abs().max())
        if not error <= LOGIT_TOLERANCE:
            raise ExportError(
                f"At depth {depth} the exported model's logits differ from the training model's by {error:.1e} of the largest."
            )
        print(f"depth {depth}: logits equal the training model's to {error:.1e}")


def check_cache(model: Any, tokens: Tensor, depths: list[int]) -> None:
    """Compares greedy generation with and without the cache at every depth; a tie may go either way."""
    prompt = tokens[:1, : -min(NEW_TOKENS, tokens.shape[1] - 1)]
    new_tokens = tokens.shape[1] - prompt.shape[1]
    for depth in depths:
        cached, plain = (
            model.generate(
                prompt,
                num_steps=depth,
                use_cache=use_cache,
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
            for use_cache in (True, False)
        )
        different = (cached.sequences != plain.sequences)[0, prompt.shape[1] :].nonzero()
        if len(different):
            first, second = plain.logits[int(different[0])][0].topk(2).values.tolist()
            if first - second > TIE:
                raise ExportError(
                    f"At depth {depth}, greedy generation with the cache differs from that without, at new token {different[0]}."
                )
    print(f"greedy generation is the same with and without cache at depths {', '.join(map(str, depths))}")


def check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Compares the ids of the exported and the training tokenizer on texts that tokenizers often disagree about."""
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(directory, trust_remote_code=True, local_files_only=True)
    for text in EDGE_CASES:
        ids, expected = exported(text)["input_ids"], tokenizer.encode(text)
        if ids != expected:
            raise ExportError(f"The exported tokenizer turns {text!r} into {ids}, the training tokenizer into {expected}.")
    for name in ("eos", "pad"):
        ids, expected = getattr(exported, f"{name}_token_id"), getattr(tokenizer, f"{name}_id")
        if ids != expected:
            raise ExportError(f"The exported tokenizer's {name} id is {ids}, the training tokenizer's {expected}.")
    print(f"tokenizer ids are the same on {len(EDGE_CASES)} edge cases")
