"""Samples text from an exported model, at any number of recurrences.

Example:
    python tools/generate.py exported/demo --prompt "def main(" --max-new-tokens 60 --num-steps 4 --temperature 0.8 --top-k 50
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch


class GenerationError(Exception):
    """Nothing can be generated from these arguments; the message is for a person."""


def load(directory: Path) -> tuple[Any, Any]:
    """Model, in the dtype it was exported in, and tokenizer. Runs the code in `directory`.

    Raises:
        GenerationError: transformers is not installed, or the directory is not an exported model.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise GenerationError(f"transformers is missing ({error}): pip install -e '.[hf]'") from error
    if not (directory / "config.json").is_file():
        raise GenerationError(f"{directory} is not an exported model: it has no config.json. Make one with tools/convert_to_hf.py.")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True, local_files_only=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def generate(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, **settings: Any) -> str:
    """Prompt and continuation. An empty prompt is the end-of-text token, after which every document began in training.

    Raises:
        GenerationError: prompt and continuation do not fit into the longest sequence.
    """
    tokens = tokenizer(prompt).input_ids or [tokenizer.eos_token_id]
    limit = model.config.max_position_embeddings
    room = limit - len(tokens)
    if room < max_new_tokens:
        remedy = f"lower --max-new-tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise GenerationError(
            f"The prompt has {len(tokens)} tokens, and with {max_new_tokens} new ones the model's limit is {limit}: {remedy}."
        )
    inputs = torch.tensor([tokens], device=model.device)
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, **settings)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of transformers' `generate`, where `top_k` 0 means all tokens."""
    if arguments.greedy:
        return {"num_steps": arguments.num_steps, "do_sample": False}
    return {"num_steps": arguments.num_steps, "do_sample": True, "temperature": arguments.temperature, "top_k": arguments.top_k}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what tools/convert_to_hf.py wrote; its code is run")
    parser.add_argument("--prompt", default="", help="text to continue (default: start a new document)")
    parser.add_argument("--num-steps", type=int, help="recurrences of the core (default: the most in training)")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest tokens; 0: all (default)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    arguments = parser.parse_args()
    for name, minimum in (("num_steps", 0), ("max_new_tokens", 1), ("top_k", 0)):
        if (value := getattr(arguments, name)) is not None and value < minimum:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {minimum}")
    if not arguments.temperature > 0:
        parser.error(f"--temperature is {arguments.temperature}; it must be above 0 (or use --greedy)")
    torch.manual_seed(arguments.seed)
    try:
        model, tokenizer = load(arguments.directory)
        if arguments.num_steps and not model.config.core_blocks:
            raise GenerationError("This model is dense: it has no core to repeat. Leave --num-steps out.")
        print(generate(model, tokenizer, arguments.prompt, arguments.max_new_tokens, **sampling_settings(arguments)))
    except (GenerationError, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
