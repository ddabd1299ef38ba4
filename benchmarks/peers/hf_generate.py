"""Run by another interpreter, that of --hf_python: `transformers` generate on padded batches.

Reads one JSON object from stdin (model, dtype, threads, max_tokens, bursts: batches of equally long token-id prompts;
the first one warms up), writes one line of JSON for each further burst: wall_s, cpu_s, tokens. Imports nothing of ours.
"""

import json
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=getattr(torch, asked["dtype"])).eval()
    warm, *bursts = asked["bursts"]
    generate(model, warm, asked["max_tokens"])
    for prompts in bursts:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = generate(model, prompts, asked["max_tokens"])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"wall_s": wall, "cpu_s": cpu, "tokens": tokens}), flush=True)


def generate(model, prompts, max_tokens):
    """Greedy, exactly `max_tokens` for every prompt; the number of new tokens."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
    return (out.shape[1] - ids.shape[1]) * out.shape[0]


if __name__ == "__main__":
    main()
