"""Hugging Face transformers as a peer: loads the same weights, generates greedily, says how long.

Runs under an interpreter of its own that has torch and transformers and no Octavo, so it imports
neither octavo nor JAX. Talks in lines of JSON: says {"ready": ...} on its standard output, then
answers each {"prompts": [[id, ...], ...], "output_tokens": n} on its standard input with one line.

The loop is written out instead of calling generate(), which adds work for every token: the peer
gets the fastest plain use of the library. All prompts of a batch have one length, so there is no
padding and no mask. The first token comes from the prefill; each decode step brings one more.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]


def load(path: Path, dtype: str) -> Any:
    """The model in a GGUF file or a Hugging Face folder, every weight dense and of this dtype."""
    folder = path
    options: dict[str, Any] = {}
    if path.is_file():
        # Left alone, transformers keeps the blocks packed and unpacks them in every matmul, which
        # is several times slower.
        dense = transformers.GgufConfig(dequantize=True)
        folder = path.parent
        options = {"gguf_file": path.name, "quantization_config": dense}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), **options
    )
    found = {str(weight.dtype) for weight in model.parameters()}
    if found != {f"torch.{dtype}"}:
        sys.exit(f"transformers loaded weights of {sorted(found)}; expected {dtype} alone")
    return model.eval()


def generate(model: Any, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
    """Runs one batch to output_tokens each; returns ids and seconds."""
    with torch.inference_mode():
        prompt_ids = torch.tensor(prompts)
        start_s = time.perf_counter()
        step = model(prompt_ids, use_cache=True, logits_to_keep=1)
        tokens = [step.logits[:, -1].argmax(-1, keepdim=True)]
        decode_start_s = time.perf_counter()
        while len(tokens) < output_tokens:
            step = model(tokens[-1], cache=step.cache, use_cache=True)
            tokens.append(step.logits[:, -1].argmax(-1, keepdim=True))
        end_s = time.perf_counter()
    return {
        "token_ids": torch.cat(tokens, dim=1).tolist(),
        "prefill_s": decode_start_s - start_s,
        "decode_s": end_s - decode_start_s,
    }


def main() -> None:
    """Answers until its standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--num_threads", type=int, required=True, help="of torch")
    arguments = parser.parse_args()

    # Whatever the libraries print goes to stderr; stdout is the protocol's alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    torch.set_num_threads(arguments.num_threads)
    model = load(arguments.model, arguments.dtype)
    say(
        {
            "ready": {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "num_threads": torch.get_num_threads(),
                "num_parameters": model.num_parameters(),
                "dtype": arguments.dtype,
            }
        }
    )
    for line in sys.stdin:
        asked = json.loads(line)
        say(generate(model, asked["prompts"], asked["output_tokens"]))


if __name__ == "__main__":
    main()
