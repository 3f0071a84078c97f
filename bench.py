"""Measurements, one command each. Without a name: tokens per second of plain, fixed and scheduled decoding, one request (Eq. 1).

    python bench.py                         24 prompts (math, code, chat), greedy and temperature 1, three repeats: 25 minutes on two cores
    python bench.py --quick                 a smaller set, within two minutes
    python bench.py --prompts FILE.jsonl    anybody's prompts: objects with "prompt" or "turns", and "domain" if they like
    python bench.py table1                  and positions, depth, block, threshold, reliability, draft: the offline study, in study.py
    python bench.py serve, simulate         many requests at once, for real and on a virtual clock: serve.py
    python bench.py kernel                  the CUDA kernel: kernel_bench.py

Method   Every prompt is decoded by every policy in turn before the next prompt, so that drift of the machine meets all alike;
         plain decoding is the same engine without a drafter. Prefill, which all share, is not in tokens/s. At temperature 1
         each repeat has its own seeds, the same for every policy. Times are sums over a domain's prompts; what is shown is the
         median over repeats, with the spread as [least, most].
tau      delivered tokens per cycle, correction or bonus included. ceiling = tau * T_plain / T_verify: the speed-up if drafting
         and everything else cost nothing. ceiling_fraction = speedup / ceiling.
Output   a table per temperature, the ledger in ms per cycle, and as last line JSON {"rows": [..], "machine": {..}}.
"""
import argparse
import json
import platform
import sys
import time
from pathlib import Path
from statistics import mean, median

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

import cli
import dspark
import kernel_bench
import smollm2
import study
from corpus import PROMPTS, read_prompts
from target import keep_freed_memory

PHASES = ("draft", "schedule", "verify", "commit")


def machine(setup) -> dict:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = [x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        name = lines[0] if lines else name
    if setup.target.device.type == "cuda":
        name = torch.cuda.get_device_name()
    return dict(processor=name, threads=torch.get_num_threads(), dtype=str(setup.target.dtype).removeprefix("torch."),
                torch=torch.__version__, date=time.strftime("%Y-%m-%d"))


def policies(setup, args, temperature):
    """name -> (drafter, gamma, policy) for dspark.generate. The losing ones are shown too."""
    drafter, gamma = setup.drafter, args.gamma or setup.drafter.gamma
    # plain decoding goes through the same engine: no drafter, blocks of length 0
    out = {"plain": (None, None, None)}
    out |= {f"fixed {g}": (drafter, g, None) for g in sorted({min(4, gamma), gamma})}
    # the paper's two ways to cut a block: where confidence falls below a constant, and where the machine says so
    threshold = cli.make_policy("threshold", setup, gamma, 1, temperature, args.threshold)
    out |= {f"threshold {args.threshold} of {gamma}": (drafter, gamma, threshold)}
    for g in sorted({min(4, gamma), gamma}):
        out |= {f"scheduled {g}": (drafter, g, cli.make_policy("scheduled", setup, g, 1, temperature))}
    # ours, with T_draft in the objective and block lengths of its own choice; it goes on learning from prompt to prompt, as in a server
    out |= {f"adaptive {gamma}": (drafter, gamma, cli.make_policy("adaptive", setup, gamma, 1, temperature))}
    wanted = args.policies or ["plain", "fixed", "threshold", "scheduled", "adaptive"]
    return {name: value for name, value in out.items() if name == "plain" or any(name.startswith(w) for w in wanted)}


def answer(*args, **kw):
    """dspark.generate for one prompt. Ctrl-C makes it return what it has: half a measurement is none, so go on interrupting."""
    [result] = dspark.generate(*args, **kw)
    if result.finish == "cancelled":
        raise KeyboardInterrupt
    return result


def measure(setup, prompts, names, temperature, args):
    """Run everything -> {(policy, repeat, domain): [Result, ..]} and the prompts whose greedy ids part from plain's."""
    runs, parted = {}, {}
    encoded = [(domain, smollm2.chat(setup.encoding, text)) for domain, text in prompts]
    for name, (drafter, gamma, policy) in names.items():  # warm-up: every policy's shapes once
        answer(setup.target, drafter, [encoded[0][1]], sampling=dspark.Sampling(temperature, max_new_tokens=24), gamma=gamma,
               policy=policy)
    # repeats outermost: a repeat is a whole pass over the prompts, so its spread shows slow drift as well as noise
    jobs = [(repeat, i) for repeat in range(args.repeats) for i in range(len(encoded))]
    for repeat, i in track(jobs, f"temperature {temperature}", console=Console(stderr=True)):
        domain, ids = encoded[i]
        sampling = dspark.Sampling(temperature, seed=1000 * repeat + i, max_new_tokens=args.max_new_tokens)
        # all policies on this prompt before the next: what the machine does in these seconds, it does to all
        for name, (drafter, gamma, policy) in names.items():
            result = answer(setup.target, drafter, [ids], sampling=sampling, gamma=gamma, policy=policy)
            runs.setdefault((name, repeat, domain), []).append(result)
            if name == "plain":
                plain = result.ids  # the first of names
            elif temperature == 0 and repeat == 0:
                if (d := cli.first_difference(setup.target, ids, result.ids, plain)) is not None:
                    parted.setdefault(name, []).append(d)
    return runs, parted


def summarize(runs, names, temperature, repeats):
    """-> rows, one per (policy, domain) and one per policy for the macro mean over domains."""
    domains = list(dict.fromkeys(d for _, _, d in runs))  # in the order of the prompts

    def ratio(a, b):  # 0 where nothing was decoded: every answer ended with the token that prefill draws
        return a / b if b else 0.0

    def one(name, repeat, domain):
        results = runs[name, repeat, domain]
        # one request at a time: each result has a ledger of its own, and sums over prompts weigh long answers more
        seconds = {p: sum(r.ledger[p] for r in results) for p in PHASES}
        cycles, tokens = max(1, sum(r.cycles for r in results)), sum(r.gained for r in results)
        return dict(tau=tokens / cycles, tokens_per_s=tokens / max(sum(seconds.values()), 1e-9),
                    **{f"{p}_ms": seconds[p] / cycles * 1e3 for p in PHASES})

    rows = []
    for name in names:
        per_repeat = []  # per repeat: one record per domain, then the mean over domains
        for repeat in range(repeats):
            records = []
            for domain in domains:
                record, plain = one(name, repeat, domain), one("plain", repeat, domain)
                record["speedup"] = ratio(record["tokens_per_s"], plain["tokens_per_s"])
                # if drafting, scheduling and committing cost nothing: every cycle one target pass, tau tokens
                record["ceiling"] = record["tau"] * ratio(plain["verify_ms"], record["verify_ms"])
                record["ceiling_fraction"] = ratio(record["speedup"], record["ceiling"])
                records.append(record)
            # macro: domains weigh the same, however many tokens each gave
            records.append({k: mean(r[k] for r in records) for k in records[0]})
            per_repeat.append(records)
        for i, domain in enumerate([*domains, "macro"]):
            row = dict(policy=name, temperature=temperature, domain=domain, prompts=len(runs[name, 0, domain]) if domain in domains
                       else sum(len(runs[name, 0, d]) for d in domains), repeats=repeats)
            for key in per_repeat[0][i]:
                values = [records[i][key] for records in per_repeat]
                row[key] = round(median(values), 4)
                if key in ("tokens_per_s", "speedup", "tau"):
                    row[f"{key}_range"] = [round(min(values), 4), round(max(values), 4)]
            rows.append(row)
    return rows


def show(console, rows, parted, temperature):
    t = Table("policy", "domain", "tau", "tokens/s", escape("[least, most]"), "speed-up", "ceiling", "of it", "draft", "schedule", "verify",
              "commit", title=f"temperature {temperature} (last four: ms a cycle)", title_justify="left")
    for r in rows:
        # a domain a line, a policy a section; its mean over domains in bold
        low, high = r["tokens_per_s_range"]
        cells = [r["policy"] if r["domain"] == rows[0]["domain"] else "", escape(r["domain"]), f"{r['tau']:.2f}", f"{r['tokens_per_s']:.1f}",
                 escape(f"[{low:.1f}, {high:.1f}]"), f"{r['speedup']:.2f}", f"{r['ceiling']:.2f}", f"{r['ceiling_fraction']:.0%}"]
        cells += [f"{r[p + '_ms']:.2f}" for p in PHASES]
        t.add_row(*cells, style="bold" if r["domain"] == "macro" else None, end_section=r["domain"] == "macro")
    console.print(t)
    if temperature == 0:
        for name, found in parted.items():
            worst = max(margin for _, margin in found)
            console.print(f"{name}: {len(found)} answers part from plain decoding; largest top-2 logit margin there {worst:.3g}")
        if not parted:
            console.print("every policy gave the ids of plain decoding on every prompt")


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if words[:1] in (["serve"], ["simulate"]):
        import serve  # it uses this file's parts

        return serve.main(words)
    if words[:1] == ["kernel"]:
        return kernel_bench.main_kernel()
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="?", choices=["speed", *study.COMMANDS], default="speed")
    p.add_argument("--prompts", help="JSONL file (default: prompts.jsonl; reliability: weights/questions.jsonl)")
    p.add_argument("--repeats", type=int, help="seeds at temperature > 0, and of speed whole passes (default: 3; reliability: 1)")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperatures", type=float, nargs="+", help="default: 0 and 1; reliability: also 0.7")
    p.add_argument("--gamma", type=int, help="longest block (default: the drafter's trained one)")
    p.add_argument("--target"), p.add_argument("--device", default="auto")
    p.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    speed = p.add_argument_group("speed")
    speed.add_argument("--quick", action="store_true", help="2 prompts a domain, 64 tokens, one repeat")
    speed.add_argument("--drafter", help="safetensors file (default: weights/dspark.safetensors)")
    speed.add_argument("--threshold", type=float, default=0.4)
    speed.add_argument("--policies", nargs="+", choices=["fixed", "threshold", "scheduled", "adaptive"], help="beside plain (default: all)")
    offline = p.add_argument_group("the offline study")
    offline.add_argument("--drafters", nargs="+", help="names in weights/, files, or lookup (default: all of weights/, and lookup)")
    offline.add_argument("--batch", type=int, default=8, help="prompts decoded together")
    offline.add_argument("--results", default=study.RESULTS, help="folder of NAME.json and NAME.png (default: docs/results)")
    args = p.parse_args(argv)
    if args.what == "reliability":
        args.prompts, args.repeats = args.prompts or study.QUESTIONS, args.repeats or 1
        args.temperatures = args.temperatures or [0.0, 0.7, 1.0]
    args.prompts, args.temperatures = args.prompts or PROMPTS, args.temperatures or [0.0, 1.0]
    args.repeats = 3 if args.repeats is None else args.repeats
    args.command_line = " ".join(["python bench.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        sys.exit(run(args) if args.what == "speed" else run_study(args))
    except (ValueError, OSError, smollm2.SetupError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def run_study(args):
    if args.repeats < 1 or args.max_new_tokens < 2 or args.batch < 1:
        raise ValueError("--repeats and --batch must be at least 1, --max-new-tokens at least 2")
    prompts = read_prompts(args.prompts)
    keep_freed_memory()
    setup = cli.load(args.target, "none", args.device, args.dtype)  # the drafters are loaded by those who run them
    cli.check_size(setup.target, [text for _, text in prompts])
    encoded = [(domain, smollm2.chat(setup.encoding, text)) for domain, text in prompts]
    for temperature in args.temperatures:
        wanted = dspark.Sampling(temperature, max_new_tokens=args.max_new_tokens)
        dspark.check(setup.target, None, [ids for _, ids in encoded], [wanted] * len(encoded), None, setup.encoding)
    args.machine = machine(setup)
    console = Console(width=None if sys.stdout and sys.stdout.isatty() else 150, highlight=False)
    console.print(f"{args.machine['processor']}, {args.machine['threads']} threads, {args.machine['dtype']}, torch {args.machine['torch']}; "
                  f"{len(prompts)} prompts, up to {args.max_new_tokens} tokens, {args.repeats} repeats where tokens are drawn")
    study.COMMANDS[args.what](setup, encoded, args, console)


def run(args):
    if args.repeats < 1 or args.max_new_tokens < 2:
        raise ValueError("--repeats must be at least 1 and --max-new-tokens at least 2")
    if not 0 <= args.threshold <= 1:
        raise ValueError(f"--threshold {args.threshold}: must be in [0, 1]")
    prompts = read_prompts(args.prompts)
    if args.quick:
        # the first two of each domain, and no more than six in all
        domains = list(dict.fromkeys(d for d, _ in prompts))
        prompts = [x for d in domains for x in [y for y in prompts if y[0] == d][:2]][:6]
        args.repeats, args.max_new_tokens, args.policies = 1, 64, args.policies or ["fixed", "scheduled"]
    keep_freed_memory()
    setup = cli.load(args.target, args.drafter, args.device, args.dtype)
    if setup.drafter is None:
        raise ValueError("--drafter none: there is nothing to compare with plain decoding")
    if args.gamma is not None and not 1 <= args.gamma <= setup.drafter.gamma:
        raise ValueError(f"--gamma {args.gamma}: this drafter was trained for blocks of 1 to {setup.drafter.gamma}")
    # whatever cannot be run is refused before anything is measured
    cli.check_size(setup.target, [text for _, text in prompts])
    for temperature in args.temperatures:
        wanted = dspark.Sampling(temperature, max_new_tokens=args.max_new_tokens)
        encoded = [smollm2.chat(setup.encoding, text) for _, text in prompts]
        dspark.check(setup.target, setup.drafter, encoded, [wanted] * len(encoded), args.gamma, setup.encoding)
    # wide enough for its columns also when piped into a file
    console = Console(width=None if sys.stdout and sys.stdout.isatty() else 150)
    info = machine(setup)
    console.print(f"{info['processor']}, {info['threads']} threads, {info['dtype']}, torch {info['torch']}; {len(prompts)} prompts, "
                  f"up to {args.max_new_tokens} tokens, {args.repeats} repeats, one request at a time")
    rows = []
    for temperature in args.temperatures:
        names = policies(setup, args, temperature)
        runs, parted = measure(setup, prompts, names, temperature, args)
        part = summarize(runs, names, temperature, args.repeats)
        show(console, part, parted, temperature)
        rows += part
    print(json.dumps(dict(rows=rows, machine=info)))  # last, and on one line: for whoever reads it by machine


if __name__ == "__main__":
    main()
