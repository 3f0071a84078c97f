"""Is our plain decoding a straw man? The same weights, dtype, threads and prompts through Hugging Face transformers' generate.

    pip install transformers
    python docs/compare_transformers.py            tokens/s of both
    python docs/compare_transformers.py --check    in fp32, do both give the same greedy ids?

Greedy, batch 1, 128 new tokens, bf16 (fp32 where the processor has no bf16), one warm-up each, five interleaved repeats, medians.
Prefill is in both figures. Both run the same dequantised weights, handed over as tensors.
"""
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import bench
import cli
import dspark
import smollm2
from target import keep_freed_memory
from transformers import LlamaConfig, LlamaForCausalLM

check = "--check" in sys.argv
keep_freed_memory()  # for both
dtype = torch.float32 if check else cli.best_dtype("cpu")
ours, encoding = smollm2.load(dtype=dtype)


def to_transformers(target):
    """The same tensors under transformers' names; only our fused projections have to be split again."""
    c = target.config
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.max_len, tie_word_embeddings=c.tied, rope_parameters=dict(rope_type="default", rope_theta=c.rope_base),
    ))
    state = {"model.embed_tokens.weight": target.embed.weight, "lm_head.weight": target.head.weight,
             "model.norm.weight": target.norm.weight}
    for i, layer in enumerate(target.layers):
        q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        parts = dict(zip(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.attn.qkv.weight.split([q, kv, kv])))
        parts |= dict(zip(("mlp.gate_proj", "mlp.up_proj"), layer.mlp.gate_up.weight.chunk(2)))
        parts |= {"self_attn.o_proj": layer.attn.out.weight, "mlp.down_proj": layer.mlp.down.weight,
                  "input_layernorm": layer.attn_norm.weight, "post_attention_layernorm": layer.mlp_norm.weight}
        state |= {f"model.layers.{i}.{name}.weight": w.clone() for name, w in parts.items()}
    theirs.load_state_dict(state)
    return theirs.to(target.dtype).eval()


theirs = to_transformers(ours)
prompts = [smollm2.chat(encoding, text) for _, text in bench.read_prompts(bench.PROMPTS)[::5]]


def run_ours(ids, n):
    return dspark.generate(ours, None, [ids], sampling=dspark.Sampling(max_new_tokens=n))[0].ids


def run_theirs(ids, n):
    x = torch.tensor([ids])
    out = theirs.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n, do_sample=False, pad_token_id=smollm2.EOS,
                          eos_token_id=smollm2.EOS)
    return out[0, len(ids) :].tolist()


if check:
    same = [run_ours(p, 64) == run_theirs(p, 64) for p in prompts]
    print(f"fp32: {sum(same)} of {len(same)} greedy answers have the same ids")
    sys.exit(not all(same))
for f in (run_ours, run_theirs):
    f(prompts[0], 16)
speeds = {run_ours: [], run_theirs: []}
for _ in range(5):
    for f in speeds:
        begin, tokens = time.perf_counter(), 0
        for p in prompts:
            tokens += len(f(p, 128))
        speeds[f].append(tokens / (time.perf_counter() - begin))
for name, f in (("ours, plain", run_ours), ("transformers", run_theirs)):
    print(f"{name:13s} {median(speeds[f]):6.1f} tokens/s  {[round(s, 1) for s in speeds[f]]}")
