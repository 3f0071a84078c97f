"""The paper's offline study (Sec. 4) on our own model: Table 1 and Figures 2 to 6, each by one command.

    python bench.py table1        accepted length tau of every drafter, by domain and temperature         (Table 1)
    python bench.py positions     conditional acceptance by position in the block                        (Fig. 2)
    python bench.py depth         tau and T_draft against the number of draft layers                     (Fig. 3)
    python bench.py block         tau against block length, and the sequential head's share of a cycle   (Fig. 4)
    python bench.py threshold     sweep of a static confidence threshold                                 (Fig. 5)
    python bench.py reliability   is confidence a probability? before and after STS                      (Fig. 6)
    python bench.py draft         T_draft beside the least that its bytes and products allow

Method   Whole blocks are verified (scheduler off) unless said otherwise, many prompts in a batch: tau does not depend on speed. Times
         are of one request. A prompt's tau is the mean over repeats (seeds), a domain's the mean over prompts with its standard
         error, macro the mean over domains.
tau      delivered tokens per cycle, correction or bonus included: 1 is plain decoding.
Output   docs/results/NAME.json with "rows", NAME.png beside it, and the same picture in the terminal.
Letters  R requests, G draft positions, n blocks.
"""
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import baselines
import cli
import dspark
import scheduler
import smollm2

RESULTS = Path(__file__).parent / "docs" / "results"
QUESTIONS = Path(__file__).parent / "weights" / "questions.jsonl"  # held out of training, written by the target: even ones fit STS, odd ones report on it
# Quoted: Table 1 of the paper for Qwen3-4B, T = 1, G = 7; means over its three benchmarks per domain
QUOTED = {"eagle": dict(math=4.56, code=3.87, chat=2.40), "dflash": dict(math=4.80, code=4.44, chat=2.95),
          "dspark": dict(math=5.57, code=5.12, chat=3.49)}


# ---------------------------------------------------------------------------------------------------------------------
# Decoding and measuring


@dataclass
class Blocks:
    """What one prompt's decoding showed: tau, and per cycle the raw confidences, the verified and the accepted tokens."""

    tau: float
    confidence: np.ndarray  # (n, G)
    verified: np.ndarray    # (n,)
    accepted: np.ndarray    # (n,)

    def survived(self):
        """(n, G) of 0 and 1: draft token k and all before it were accepted."""
        return np.arange(self.confidence.shape[1]) < self.accepted[:, None]


def decode(target, drafter, prompts, temperature, gamma=None, policy=None, max_new_tokens=128, batch=8, seed=0, label="") -> list[Blocks]:
    """Decode prompts (lists of ids), `batch` at a time; one Blocks per prompt. Default: whole blocks of the trained length."""
    out, G = [], dspark.block_length(drafter, gamma)
    for i in track(range(0, len(prompts), batch), label, console=Console(stderr=True), transient=True, disable=not label):
        part = prompts[i : i + batch]
        cycles = [[] for _ in part]
        # seeds by prompt, not by batch: another batch size draws the same under a policy that does not look at the load
        sampling = [dspark.Sampling(temperature, seed=seed + i + j, max_new_tokens=max_new_tokens) for j in range(len(part))]
        results = dspark.generate(target, drafter, part, sampling=sampling, gamma=gamma, policy=policy,
                                  on_cycle=lambda request, cycle: cycle is not None and cycles[request.slot].append(cycle))
        if cli.cancelled(results):
            raise KeyboardInterrupt
        for result, mine in zip(results, cycles):
            confidence = np.array([c.confidence for c in mine]).reshape(-1, G)
            out.append(Blocks(result.tau, confidence, np.array([c.verify_len for c in mine], int), np.array([c.n_accepted for c in mine], int)))
    return out


def whole(blocks):
    """Stack the blocks that were verified whole (the last of an answer may be cut short): confidence (n, G), survived (n, G)."""
    kept = [(b.confidence[full], b.survived()[full]) for b in blocks for full in [b.verified == b.confidence.shape[1]]]
    if not any(len(c) for c, _ in kept):
        raise ValueError("no block was verified whole: the answers are too short; raise --max-new-tokens")
    return tuple(np.concatenate(x) for x in zip(*kept))


def tau_by_prompt(runs):
    """Per prompt a list of Blocks (one a repeat) -> tau by prompt; NaN where every answer ended with the token that prefill draws."""
    out = []
    for repeats in runs:
        known = [b.tau for b in repeats if len(b.verified)]
        out.append(np.mean(known) if known else math.nan)
    return out


def mean_and_error(values):
    """Mean of what is known and its standard error; 0 for a single value, of which none is known."""
    values = np.asarray(values, float)
    values = values[np.isfinite(values)]
    return values.mean(), values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def by_domain(values, domains):
    """One value per prompt -> {domain: (mean, error)} with "macro", the mean over domains, last."""
    out = {d: mean_and_error([v for v, e in zip(values, domains) if e == d]) for d in dict.fromkeys(domains)}
    means, errors = zip(*out.values())
    return out | {"macro": (float(np.mean(means)), math.sqrt(sum(e * e for e in errors)) / len(errors))}


@torch.inference_mode()
def milliseconds(step, repeats=30):
    """Median time of step() in ms."""
    times = []
    for i in range(repeats + 5):  # five to warm up
        begin = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return float(np.median(times[5:]))


def propose_ms(target, drafter, G, temperature=0.0, context=256):
    """T_draft of one request with `context` tokens behind it."""
    context = min(context, target.config.max_len - G - 1)
    cache, zeros = drafter.new_cache(1, context + 1), torch.zeros(context, dtype=torch.long, device=target.device)
    tokens = torch.arange(context, device=target.device) % target.config.vocab_size
    width = len(drafter.feature_layers) * target.config.d_model
    drafter.extend(tokens, torch.randn(context, width, device=target.device).to(target.dtype), zeros, torch.arange(context, device=target.device),
                   cache)
    u, position = torch.full((1, G), 0.5, dtype=torch.float64, device=target.device), torch.tensor([context], device=target.device)
    return milliseconds(lambda: drafter.propose(tokens[:1], zeros[:1], position, cache, G, u, temperature))


def step_ms(target, n, context=256):
    """A target step over n rows of one request."""
    context = min(context, target.config.max_len - n)
    cache = target.new_cache(1, context + n)
    rows = torch.ones(n, dtype=torch.long), torch.zeros(n, dtype=torch.long), torch.arange(context, context + n)
    rows = [r.to(target.device) for r in rows]
    return milliseconds(lambda: target(*rows, cache))


class Stopwatch:
    """Stands for a model and adds up the time spent in its calls: what is left of a cycle is the engine's own."""

    def __init__(self, model, spent):
        self.model, self.spent = model, spent

    def __getattr__(self, name):
        return self.timed(getattr(self.model, name)) if name in ("propose", "extend") else getattr(self.model, name)

    def __call__(self, *args, **kw):
        return self.timed(self.model)(*args, **kw)

    def timed(self, call):
        def wrapped(*args, **kw):
            begin = time.perf_counter()
            result = call(*args, **kw)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.spent[0] += time.perf_counter() - begin
            return result

        return wrapped


def engine_share(setup, drafter, ids, G, temperature, max_new_tokens):
    """One request decoded with whole blocks of G -> (ms a cycle, ms of it in neither model): softmax, acceptance, bookkeeping."""
    spent = [0.0]
    target, watched = Stopwatch(setup.target, spent), Stopwatch(drafter, spent)
    sampling, marks = dspark.Sampling(temperature, max_new_tokens=max_new_tokens, eos=-1), []
    # the first mark comes after prefill: models and clock are read there, so that only cycles count
    dspark.generate(target, watched, [ids], sampling=sampling, gamma=G,
                    on_cycle=lambda *_: marks.append((time.perf_counter(), spent[0])))
    cycles, total, models = len(marks) - 1, *(b - a for a, b in zip(marks[0], marks[-1]))
    return total / cycles * 1e3, (total - models) / cycles * 1e3


def parameters(drafter) -> int:
    network = getattr(drafter, "network", drafter)  # CopyFirst has one
    return sum(p.numel() for p in network.parameters()) if isinstance(network, torch.nn.Module) else 0


# ---------------------------------------------------------------------------------------------------------------------
# Showing


def save(name, rows, args, figure=None):
    """docs/results/NAME.json (and .png): rows, the command, the machine."""
    folder = Path(args.results)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    (folder / f"{name}.json").write_text(json.dumps(dict(command=args.command_line, machine=args.machine, rows=rows), indent=1) + "\n")
    if figure is not None:
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=110)
    print(f"written: {folder / name}.json" + (" and .png" if figure is not None else ""))


def figure(n=1, title=""):
    """A matplotlib figure with n axes side by side, no display needed."""
    from matplotlib.figure import Figure  # only the plots need it

    f = Figure(figsize=(5 * n, 3.6))
    if title:
        f.suptitle(title)
    return f, [f.add_subplot(1, n, i + 1) for i in range(n)]


def draw_text(console, series, x_label, y_label, width=60, height=14):
    """The picture for a terminal: series {name: [(x, y), ..]}, a letter each."""
    points = [p for line in series.values() for p in line if np.isfinite(p).all()]
    if not points:
        return
    (x0, y0), (x1, y1) = np.min(points, 0), np.max(points, 0)
    grid = [[" "] * width for _ in range(height)]
    letters = "abcdefghijklmnopqrstuvwxyz"
    for letter, line in zip(letters, series.values()):
        for x, y in line:
            if np.isfinite([x, y]).all():
                column = round((x - x0) / ((x1 - x0) or 1) * (width - 1))
                row = height - 1 - round((y - y0) / ((y1 - y0) or 1) * (height - 1))
                grid[row][column] = "*" if grid[row][column] not in (" ", letter) else letter
    for i, row in enumerate(grid):
        edge = f"{y1:8.3g}" if i == 0 else f"{y0:8.3g}" if i == height - 1 else " " * 8
        console.print(f"{edge} |{''.join(row)}", markup=False, highlight=False)
    console.print(f"{'':9}+{'-' * width}\n{'':10}{x0:<8.3g}{x_label:^{width - 16}}{x1:>8.3g}", markup=False, highlight=False)
    console.print(f"{'':10}{y_label}: " + "  ".join(f"{letter} {name}" for letter, name in zip(letters, series)) + "  (* several)",
                  markup=False, highlight=False)


def show(console, axis, series, x_label, y_label):
    """series {name: [(x, y), ..]} as lines with points on a matplotlib axis, and as text in the terminal."""
    for name, line in series.items():
        if line:
            axis.plot(*zip(*line), marker="o", label=name)
    axis.set_xlabel(x_label), axis.set_ylabel(y_label)
    if any(series.values()):
        axis.legend()
    draw_text(console, series, x_label, y_label)


# ---------------------------------------------------------------------------------------------------------------------
# Table 1 and the figures. Each: (setup, prompts [(domain, ids)], args, console)


def drafters(setup, args):
    """{name: drafter}: the files of weights/ and prompt lookup, or those named (a path, or a name in weights/)."""
    names = args.drafters or [*sorted((p.stem for p in cli.DRAFTER.parent.glob("*.safetensors")), key=lambda n: (n != "dspark", n)), "lookup"]
    out = {}
    for name in names:
        if name == "lookup":
            out[name] = baselines.PromptLookup(7, device=setup.target.device)
        else:
            out[cli.find_drafter(name).stem + cli.COPY * name.endswith(cli.COPY)] = cli.load_drafter(name, setup.target)[0]
    return out


def first_drafter(setup, args):
    """The one drafter that a figure is about (--drafters, default dspark), with its calibration put into setup."""
    name = (args.drafters or ["dspark"])[0]
    [(name, drafter)] = drafters(setup, SimpleNamespace(drafters=[name])).items()
    if name != "lookup" and not name.endswith(cli.COPY):  # the one has none, the other uses it itself
        setup.calibration = cli.read_calibration(cli.find_drafter((args.drafters or ["dspark"])[0]), drafter.gamma)
    return name, drafter


def run_all(setup, drafter, prompts, temperature, args, label, **kw):
    """decode() with args.repeats seeds (one is enough where nothing is drawn) -> per prompt a list of Blocks."""
    repeats = 1 if temperature == 0 else args.repeats
    runs = [decode(setup.target, drafter, [ids for _, ids in prompts], temperature, max_new_tokens=args.max_new_tokens, batch=args.batch,
                   seed=1000 * r, label=f"{label}, T = {temperature:g}", **kw) for r in range(repeats)]
    return list(zip(*runs))


def table1(setup, prompts, args, console):
    domains, rows, taus = [d for d, _ in prompts], [], {}
    known = drafters(setup, args)
    for name, drafter in known.items():
        G = min(args.gamma or 7, drafter.gamma)
        for temperature in args.temperatures:
            runs = run_all(setup, drafter, prompts, temperature, args, name, gamma=G)
            taus[name, temperature] = tau_by_prompt(runs)
            for domain, (tau, error) in by_domain(taus[name, temperature], domains).items():
                rows.append(dict(drafter=name, temperature=temperature, domain=domain, tau=float(tau), stderr=float(error), gamma=G,
                                 parameters=parameters(drafter)))
    cost = {name: propose_ms(setup.target, drafter, min(args.gamma or 7, drafter.gamma)) for name, drafter in known.items()}
    rows = [row | dict(draft_ms=cost[row["drafter"]]) for row in rows]
    for temperature in args.temperatures:
        t = Table("drafter", *dict.fromkeys(domains), "macro", "parameters", "T_draft ms", title=f"tau at temperature {temperature:g}",
                  title_justify="left")
        for name in known:
            mine = {r["domain"]: r for r in rows if r["drafter"] == name and r["temperature"] == temperature}
            t.add_row(name, *(f"{r['tau']:.2f} ±{r['stderr']:.2f}" for r in mine.values()), f"{mine['macro']['parameters'] / 1e6:.1f} M",
                      f"{cost[name]:.1f}")
        if temperature == 1 and set(domains) == {"math", "code", "chat"}:
            for name, q in QUOTED.items():
                t.add_row(f"quoted: {name}, Qwen3-4B", *(f"{q[d]:.2f}" for d in dict.fromkeys(domains)), f"{np.mean(list(q.values())):.2f}", "", "",
                          style="dim")
        console.print(t)
        if "dspark" in known:
            for name in known:
                if name == "dspark":
                    continue
                # paired by prompt: both decode the same texts, so their differences vary less than either
                ours, theirs = (by_domain(taus[n, temperature], domains)["macro"][0] for n in ("dspark", name))
                error = by_domain(np.subtract(taus["dspark", temperature], taus[name, temperature]), domains)["macro"][1]
                console.print(f"dspark over {name}: {ours / theirs - 1:+.1%} ± {error / theirs:.1%}")
    f, axes = figure(len(args.temperatures), "Accepted length (Table 1)")
    for axis, temperature in zip(axes, args.temperatures):
        macro = [r for r in rows if r["domain"] == "macro" and r["temperature"] == temperature]
        axis.barh([r["drafter"] for r in macro], [r["tau"] - 1 for r in macro], xerr=[r["stderr"] for r in macro], left=1)
        axis.set_xlabel(f"tau, T = {temperature:g} (1: plain decoding)"), axis.invert_yaxis()
    save("table1", rows, args, f)


def positions(setup, prompts, args, console):
    rows, f_rows = [], {}
    for name, drafter in drafters(setup, args).items():
        for temperature in args.temperatures:
            runs = run_all(setup, drafter, prompts, temperature, args, name)
            for domain in [*dict.fromkeys(d for d, _ in prompts), "all"]:
                _, o = whole([b for (d, _), bs in zip(prompts, runs) if domain in (d, "all") for b in bs])
                # conditional: among blocks in which all tokens before k passed
                reached = np.concatenate([[len(o)], o.sum(0)[:-1]])
                for k in range(o.shape[1]):
                    rows.append(dict(drafter=name, temperature=temperature, domain=domain, position=k + 1, blocks=int(reached[k]),
                                     conditional=float(o[:, k].sum() / reached[k]) if reached[k] else None, unconditional=float(o[:, k].mean())))
                if domain == "all":
                    f_rows[temperature, name] = [(r["position"], r["conditional"]) for r in rows[-o.shape[1] :] if r["blocks"] >= 30]
    f, axes = figure(len(args.temperatures), "Conditional acceptance by position (Fig. 2; positions reached 30 times)")
    for axis, temperature in zip(axes, args.temperatures):
        series = {name: line for (t, name), line in f_rows.items() if t == temperature}
        show(console, axis, series, f"position k, T = {temperature:g}", "accepted, given all before were")
    save("positions", rows, args, f)


def depth(setup, prompts, args, console):
    rows, domains = [], [d for d, _ in prompts]
    for name, drafter in drafters(setup, args).items():
        if not isinstance(drafter, torch.nn.Module) or drafter.config.head == "eagle":
            continue
        for temperature in args.temperatures:
            runs = run_all(setup, drafter, prompts, temperature, args, name)
            tau, error = by_domain(tau_by_prompt(runs), domains)["macro"]
            rows.append(dict(drafter=name, layers=drafter.config.n_layers, head=drafter.config.head, temperature=temperature, tau=tau, stderr=error,
                             parameters=parameters(drafter), draft_ms=propose_ms(setup.target, drafter, drafter.gamma)))
    f, axes = figure(len(args.temperatures), "Depth (Fig. 3)")
    for axis, temperature in zip(axes, args.temperatures):
        part = [r for r in rows if r["temperature"] == temperature]
        series = {h: sorted((r["layers"], r["tau"]) for r in part if r["head"] == h) for h in dict.fromkeys(r["head"] for r in part)}
        show(console, axis, series, f"draft layers, T = {temperature:g}", "tau, macro")
    save("depth", rows, args, f)


def block(setup, prompts, args, console):
    """Blocks of every length up to the trained one; the head's share is what the loop over positions adds to a parallel pass."""
    rows, domains = [], [d for d, _ in prompts]
    for name, drafter in drafters(setup, args).items():
        for G in sorted({g for g in (1, 2, 3, 4, 5, 7, 11, 15) if g <= drafter.gamma}):
            draft, verify = propose_ms(setup.target, drafter, G), step_ms(setup.target, 1 + G)
            head = None
            if isinstance(drafter, torch.nn.Module) and drafter.config.head != "eagle":
                context = min(256, setup.target.config.max_len - G - 1)
                cache = drafter.new_cache(1, context + 1)
                where = torch.tensor([[0], [0], [context]], device=setup.target.device)  # anchor, slot, position
                parallel = milliseconds(lambda: drafter.unembed(drafter.block(*where, cache, G)))
                head = (draft - parallel) / (draft + verify)
            for temperature in args.temperatures:
                runs = run_all(setup, drafter, prompts, temperature, args, f"{name}, G = {G}", gamma=G)
                tau, error = by_domain(tau_by_prompt(runs), domains)["macro"]
                rows.append(dict(drafter=name, gamma=G, trained=drafter.gamma, temperature=temperature, tau=tau, stderr=error, draft_ms=draft,
                                 verify_ms=verify, head_share=head))
    plain = step_ms(setup.target, 1)
    f, axes = figure(2 * len(args.temperatures), "Block length (Fig. 4)")
    for i, temperature in enumerate(args.temperatures):
        part = [r for r in rows if r["temperature"] == temperature]
        for axis, key in zip(axes[2 * i :], ("tau", "speed")):
            value = {"tau": lambda r: r["tau"], "speed": lambda r: r["tau"] * plain / (r["draft_ms"] + r["verify_ms"])}[key]
            series = {n: [(r["gamma"], value(r)) for r in part if r["drafter"] == n] for n in dict.fromkeys(r["drafter"] for r in part)}
            label = "tau" if key == "tau" else "tau T_plain / (T_draft + T_verify)"
            show(console, axis, series, f"block length G, T = {temperature:g}", label)
    save("block", rows, args, f)


def threshold(setup, prompts, args, console):
    """Fig. 5 for the first of the drafters. Acceptance rate by two definitions, for they differ where blocks are cut: accepted of
    verified tokens, and the mean over cycles of each cycle's own share (cycles that verify nothing have none)."""
    name, drafter = first_drafter(setup, args)
    rows, sts = [], {t: cli.nearest_sts(setup, t) for t in args.temperatures}
    for temperature in args.temperatures:
        for cut in np.arange(0, 0.85, 0.1).round(1).tolist():
            runs = run_all(setup, drafter, prompts, temperature, args, f"threshold {cut}",
                           policy=lambda c, cut=cut, s=sts[temperature]: scheduler.threshold(scheduler.calibrated(c, s), cut))
            for domain in [*dict.fromkeys(d for d, _ in prompts), "all"]:
                mine = [b for (d, _), bs in zip(prompts, runs) if domain in (d, "all") for b in bs]
                v, a = (np.concatenate([getattr(b, x) for b in mine]) for x in ("verified", "accepted"))
                rows.append(dict(drafter=name, temperature=temperature, domain=domain, threshold=cut, tau=float(np.mean([b.tau for b in mine if len(b.verified)])),
                                 verified_per_cycle=float(v.mean()), accepted_of_verified=float(a.sum() / v.sum()) if v.sum() else None,
                                 accepted_per_cycle_mean=float((a[v > 0] / v[v > 0]).mean()) if v.any() else None))
    f, axes = figure(2 * len(args.temperatures), "Static threshold (Fig. 5)")
    for i, temperature in enumerate(args.temperatures):
        for axis, key in zip(axes[2 * i :], ("accepted_of_verified", "tau")):
            part = [r for r in rows if r["temperature"] == temperature]
            series = {d: [(r["threshold"], r[key]) for r in part if r["domain"] == d and r[key] is not None] for d in dict.fromkeys(r["domain"] for r in part)}
            show(console, axis, series, f"threshold on c_k, T = {temperature:g}", key.replace("_", " "))
    save("threshold", rows, args, f)


def reliability(setup, prompts, args, console):
    """Fig. 6 on held-out questions that took no part in fitting: survival a_k as predicted, raw and calibrated, against what came.

    Beside both stands a constant: each position's mean survival on the other half of the questions. It has no ECE to speak of and
    ranks nothing (AUC 0.5): Brier is where a head has to beat it."""
    name, drafter = first_drafter(setup, args)
    rows, curves = [], {}
    for temperature in args.temperatures:
        sts = cli.nearest_sts(setup, temperature)
        if sts is None:
            raise ValueError(f"{name} has no calibration: run 'python train.py calibrate' first")
        runs = run_all(setup, drafter, prompts, temperature, args, name)
        (_, fitted), (c, o) = (whole([b for bs in half for b in bs]) for half in (runs[::2], runs[1::2]))
        raw, calibrated = scheduler.survival(c), scheduler.survival(scheduler.apply_sts(c, sts))
        for k in range(drafter.gamma):
            y, constant = o[:, k], np.full(len(o), fitted[:, k].mean())
            row = dict(drafter=name, temperature=temperature, position=k + 1, blocks=len(o), survived=float(y.mean()), auc=scheduler.auc(raw[:, k], y))
            for label, p in (("raw", raw[:, k]), ("sts", calibrated[:, k]), ("constant", constant)):
                row |= {f"ece_{label}": scheduler.ece(p, y), f"brier_{label}": scheduler.brier(p, y)}
            rows.append(row)
        for label, p in (("raw", raw), ("STS", calibrated)):
            bins = np.minimum((p.ravel() * 10).astype(int), 9)
            curves[temperature, label] = [(p.ravel()[bins == b].mean(), o.ravel()[bins == b].mean()) for b in range(10) if (bins == b).sum() >= 30]
    t = Table("T", "position", "survived", "ECE raw", "ECE STS", "constant", "Brier raw", "Brier STS", "constant", "AUC",
              title=f"{name}: survival a_k on {rows[0]['blocks']} blocks and more", title_justify="left")
    for r in rows:
        t.add_row(*(f"{r[key]:.3g}" for key in ("temperature", "position")), *(f"{r[key]:.3f}" for key in (
            "survived", "ece_raw", "ece_sts", "ece_constant", "brier_raw", "brier_sts", "brier_constant", "auc")), end_section=r["position"] == drafter.gamma)
    console.print(t)
    for temperature in args.temperatures:
        mean = {key: np.mean([r[key] for r in rows if r["temperature"] == temperature]) for key in ("ece_raw", "ece_sts")}
        console.print(f"T = {temperature:g}: mean ECE {mean['ece_raw']:.2%} raw, {mean['ece_sts']:.2%} after STS")
    f, axes = figure(len(args.temperatures), "Reliability of survival a_k (Fig. 6)")
    for axis, temperature in zip(axes, args.temperatures):
        series = {label: line for (t_, label), line in curves.items() if t_ == temperature}
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        show(console, axis, series, f"predicted survival, T = {temperature:g}", "came true")
    save("reliability", rows, args, f)


def draft(setup, prompts, args, console):
    """T_draft against its floor: the bytes that one proposal must read at the rate of a copy, and its products at the rate of a
    large matrix product, whichever is more. Both rates are measured here."""
    big = torch.empty(64 << 20, dtype=torch.bfloat16)
    copy = torch.empty_like(big)
    bandwidth = 2 * big.numel() * 2 / milliseconds(lambda: copy.copy_(big), 10) * 1e3  # read and written
    square = torch.randn(2048, 2048).to(setup.target.dtype)
    rate = 2 * 2048**3 / milliseconds(lambda: square @ square, 10) * 1e3
    rows = []
    for name, drafter in drafters(setup, args).items():
        if not isinstance(drafter, torch.nn.Module):
            continue
        K, D = drafter.head_rows.shape
        for G in sorted({1, min(4, drafter.gamma), drafter.gamma}):
            size, r = setup.target.dtype.itemsize, drafter.config.rank
            dense = sum(p.numel() for n, p in drafter.named_parameters() if not n.startswith(("head.", "context_"))) + K * D
            loop = parameters(drafter.head) - (K + 1) * r  # read again at every position; W1 is a lookup
            passes = (G, 0) if drafter.config.head == "eagle" else (1, G)
            read, products = size * (dense * passes[0] + loop * passes[1]), 2 * G * (dense + loop)
            floor = max(read / bandwidth, products / rate) * 1e3
            for temperature in (0.0, 1.0):
                ms = propose_ms(setup.target, drafter, G, temperature)
                rows.append(dict(drafter=name, gamma=G, temperature=temperature, draft_ms=ms, floor_ms=floor, bytes=read, flops=products,
                                 copy_GB_s=bandwidth / 1e9, product_GFLOP_s=rate / 1e9))
    t = Table("drafter", "G", "T", "T_draft ms", "floor ms", "MB read", "MFLOP", title=f"a copy moves {bandwidth / 1e9:.0f} GB/s, products reach "
              f"{rate / 1e9:.0f} GFLOP/s", title_justify="left")
    for r in rows:
        t.add_row(r["drafter"], str(r["gamma"]), f"{r['temperature']:g}", f"{r['draft_ms']:.2f}", f"{r['floor_ms']:.2f}", f"{r['bytes'] / 1e6:.1f}",
                  f"{r['flops'] / 1e6:.0f}")
    console.print(t)
    name, drafter = first_drafter(setup, args)
    for G in sorted({min(4, drafter.gamma), drafter.gamma}):
        for temperature in (0.0, 1.0):
            cycle, engine = np.median([engine_share(setup, drafter, ids, G, temperature, args.max_new_tokens) for _, ids in prompts[:5]], axis=0)
            rows.append(dict(drafter=name, gamma=G, temperature=temperature, cycle_ms=float(cycle), engine_ms=float(engine)))
            console.print(f"{name}, G = {G}, T = {temperature:g}: {cycle:.2f} ms a cycle, {engine:.2f} ms ({engine / cycle:.1%}) in neither model")
    save("draft", rows, args)


COMMANDS = dict(table1=table1, positions=positions, depth=depth, block=block, threshold=threshold, reliability=reliability, draft=draft)
