"""Is our plain decoding a straw man? The same weights, dtype, threads and prompts through Hugging Face transformers' generate.

    pip install transformers accelerate
    python docs/compare_transformers.py

Greedy, batch 1, 128 new tokens, bf16 (fp32 where the processor has no bf16), one warm-up each, three interleaved repeats, medians.
Prefill is in both figures. In fp32 the two also have to agree on the ids: --check.
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
from transformers import AutoModelForCausalLM

check = "--check" in sys.argv
keep_freed_memory()  # for both
dtype = torch.float32 if check else cli.best_dtype("cpu")
ours, encoding = smollm2.load(dtype=dtype)
path = smollm2.weights_file()
theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
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
for _ in range(3):
    for f in speeds:
        begin, tokens = time.perf_counter(), 0
        for p in prompts:
            tokens += len(f(p, 128))
        speeds[f].append(tokens / (time.perf_counter() - begin))
for name, f in (("ours, plain", run_ours), ("transformers", run_theirs)):
    print(f"{name:13s} {median(speeds[f]):6.1f} tokens/s  {[round(s, 1) for s in speeds[f]]}")
