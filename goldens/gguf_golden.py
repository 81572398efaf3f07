#!/usr/bin/env python3
"""Makes goldens/gguf: tiny models as GGUF files, and the same models as folders of transformers.

The values in a folder are those of PyPI's gguf for the stored blocks, in HF's order of rows. Where
transformers reads the architecture itself, its tensors are asserted to be the same.

    pip install torch transformers gguf     # 2.x, 5.23, 0.19
    python3 goldens/gguf_golden.py
"""
import pathlib

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

ROOT = pathlib.Path(__file__).parent / "gguf"
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=256, vocab_size=288)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192, rope_theta=500000.0)
MODELS = {
    "llama": (LlamaConfig(**SIZES, rope_parameters=LLAMA3, attention_bias=True, tie_word_embeddings=False), "llama-bpe"),
    "qwen2": (Qwen2Config(**SIZES, tie_word_embeddings=True), "qwen2"),
    "qwen3": (Qwen3Config(**SIZES, tie_word_embeddings=False), "smollm"),
    "gemma": (GemmaConfig(**SIZES, tie_word_embeddings=True), "gpt-2"),
}
TYPES = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16", "F32"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
           "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def byte_alphabet():
    """GPT-2's printable characters for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) if b in plain else chr(256 + sum(c not in plain for c in range(b))) for b in range(256)]


def permuted(weight, heads):
    """llama.cpp's order of rows: the two of a rotary pair are neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def restored(weight, heads):
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name):
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, index, module = module.split(".", 3)
        return f"blk.{index}.{NAMES[module]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def rotary_factors(config):
    """The factors that llama.cpp's converter writes for Llama 3's scaling, in f32 as there."""
    p, dim = config.rope_parameters, config.head_dim
    frequencies = 1.0 / p["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    low = p["original_max_position_embeddings"] / p["low_freq_factor"]
    high = p["original_max_position_embeddings"] / p["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        wave = 2 * np.pi / frequency
        smooth = (p["original_max_position_embeddings"] / wave - p["low_freq_factor"]) / (
            p["high_freq_factor"] - p["low_freq_factor"])
        factors.append(1.0 if wave < high else p["factor"] if wave > low else 1 / ((1 - smooth) / p["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def make(name, config, pre):
    torch.manual_seed(25)
    folder = ROOT / name
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_config(config).float()
    writer = gguf.GGUFWriter(folder / "model.gguf", name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rotary_factors(config))
    tokens = byte_alphabet() + ["Ġt", "he", "Ġthe", "Ġa", "12", "in", "<|im_start|>", "<|im_end|>", "<tool>"]
    kinds = [1] * 262 + [3, 3, 4] + [5] * (config.vocab_size - 265)
    tokens += [f"[PAD{i}]" for i in range(265, config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "Ġ a", "1 2", "i n"])
    writer.add_bos_token_id(262)
    writer.add_eos_token_id(263)
    writer.add_chat_template(TEMPLATE)
    state, names = model.state_dict(), [n for n, _ in model.named_parameters()]
    for index, hf in enumerate(names):
        value = state[hf].numpy()
        value = value + np.random.default_rng(index).standard_normal(value.shape).astype(np.float32) * 0.05
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(hf.split(".")[-2])
        heads = heads if name == "llama" else None
        value = permuted(value, heads) if heads else value
        is_norm = hf.endswith("norm.weight")
        value = value + np.float32(1) if is_norm and name == "gemma" else value
        kind = gguf.GGMLQuantizationType["F32" if value.ndim == 1 else TYPES[index % len(TYPES)]]
        stored = gguf.quants.quantize(value, kind)
        writer.add_tensor(gguf_name(hf), stored, raw_dtype=kind)
        value = gguf.quants.dequantize(stored, kind).astype(np.float32)
        value = value - np.float32(1) if is_norm and name == "gemma" else value
        state[hf] = torch.from_numpy((restored(value, heads) if heads else value).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # transformers 5.23 does not read Gemma 1, nor the head width of Qwen 3.
    if name in ("llama", "qwen2"):
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).state_dict()
        # Of a Llama with biases it makes one without.
        for key, value in read.items():
            assert torch.equal(value, state[key]), (name, key)


for name, (config, pre) in MODELS.items():
    make(name, config, pre)
