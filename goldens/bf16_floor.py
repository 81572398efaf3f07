"""How far bf16 products must move a model's logits: the error of rounding nothing but what they read.

    python goldens/bf16_floor.py FOLDER [NAME …]

FOLDER is a folder of goldens. Every linear layer reads weights and inputs rounded to bf16; everything else, also its
result, is f32. A trainer in bf16 can be no closer to f32 than about this, however it treats norms, residuals and
attention. Needs torch and transformers.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM


def sequences(tokens):
    """Every list of integers in a nested structure."""
    if isinstance(tokens, list) and tokens and all(isinstance(t, int) for t in tokens):
        yield tokens
    elif isinstance(tokens, (list, dict)):
        for part in tokens.values() if isinstance(tokens, dict) else tokens:
            yield from sequences(part)


def rounded(x):
    return x.bfloat16().float()


@torch.no_grad()
def logits(model, texts):
    return torch.cat([model(torch.tensor([text])).logits[0] for text in texts])


def main():
    folder = pathlib.Path(sys.argv[1])
    names = sys.argv[2:] or ["llama-small"]
    texts = [text for text in sequences(json.loads((folder / "tokens.json").read_text())) if len(text) > 8][:12]
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(folder / "models" / name, dtype=torch.float32)
        exact = logits(model, texts)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":
                module.weight.data = rounded(module.weight.data)
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
        error = logits(model, texts) - exact
        whole, largest = error.norm() / exact.norm(), error.abs().max() / exact.abs().max()
        print(f"{name}: {whole:.2e} as a whole, {largest:.2e} of the largest")


main()
