"""
Tests of serve.py: the loops, their arithmetic, and the stand-in for the models. Run: python -m pytest tests/test_serve.py

Everything here runs on a virtual clock or on tiny models: no figure depends on how busy the machine is.
"""
import json
import math

import numpy as np
import pytest
import torch

import cli
import drafter as drafting
import dspark
import scheduler
import serve
import smollm2
from drafter import tiny_drafter
from dspark import Sampling, generate
from target import tiny_target
from test_dspark import BYTES

G = 3


def answers_of(n=6, places=60, chance=0.6, seed=0):
    """Records as serve.record makes them: confidences that mean what they say."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        c = rng.uniform(chance - 0.3, chance + 0.3, (places, 7))
        accepted = np.cumprod(rng.random((places, 7)) < c, axis=1).sum(axis=1)
        out.append(dict(domain="abc"[i % 3], prompt=5 + i, accepted=accepted.tolist(), confidence=c.round(4).tolist()))
    return out


def simulated(answers, gamma=7, slots=64):
    costs = serve.h200_like(slots, gamma)
    clock = serve.VirtualClock()
    replay = serve.Replay(answers, gamma, costs, clock)
    return serve.Parts(replay, replay, clock, clock.wait), costs


def jobs_of(answers, lengths):
    return [([2 + i % len(answers)] * answers[i % len(answers)]["prompt"], Sampling(max_new_tokens=n)) for i, n in enumerate(lengths)]


class Args:
    prefill_rows, completions = 1024, 12


# ---------------------------------------------------------------------------------------------------------------------
# the stand-in


def test_replay_accepts_what_the_record_says():
    """One request, whole blocks: the cycles can be read off the record by hand."""
    answers = answers_of()
    parts, costs = simulated(answers)
    cycles = []
    [r] = generate(parts.target, parts.drafter, [[2 + 1] * 6], sampling=Sampling(max_new_tokens=41), gamma=7,
                   on_cycle=lambda r, c: c and cycles.append(c))
    at, wanted = 0, []
    while at < 40:
        l = min(7, 40 - at - 1)
        n = min(answers[1]["accepted"][at], l)
        wanted.append((l, n))
        at += 1 + n
    assert [(c.verify_len, c.n_accepted) for c in cycles] == wanted and r.ids == [1] * 41
    assert [c.confidence for c in cycles][0] == pytest.approx(answers[1]["confidence"][0])
    # the clock: a pass over the prompt, then a draft and a verification a cycle
    prefill = np.interp(6, parts.target.rows, parts.target.seconds)
    assert parts.clock() == pytest.approx(prefill + sum(costs.draft[1, 7] + np.interp(l, range(8), costs.verify[1]) for l, _ in wanted))


def test_replay_of_a_recorded_run_is_that_run(monkeypatch):
    """record() with a model, then the engine on the replay: cycle for cycle what the engine does with the model (greedy)."""
    target = tiny_target(BYTES.n_vocab, max_len=256, tied=False).double()
    drafter = tiny_drafter(target, G)
    setup = cli.Setup(target, drafter, BYTES, {})
    # a random drafter hardly ever hits; this one is told what comes next, and lies at every fourth place
    truth = {}

    def propose(anchors, slots, positions, cache, gamma, u, *settings):
        draft = drafting.Drafter.propose(drafter, anchors, slots, positions, cache, gamma, u, *settings)
        draft.tokens = torch.zeros(len(anchors), gamma, dtype=torch.long)
        for i, (slot, place) in enumerate(zip(slots.tolist(), positions.tolist())):
            text = truth[slot]
            for k in range(gamma):
                at = place + 1 + k
                draft.tokens[i, k] = text[at] if at < len(text) and at % 4 else 3
        return draft

    prompts = [("x", "one"), ("y", "two and more"), ("x", "three")]
    encoded = [smollm2.chat(BYTES, text) for _, text in prompts]
    s = Sampling(max_new_tokens=40)
    for slot, (ids, r) in enumerate(zip(encoded, generate(target, None, encoded, sampling=s))):
        truth[slot] = ids + r.ids
    monkeypatch.setattr(drafter, "propose", propose)
    known = serve.record(setup, prompts, G, 40)
    assert [a["prompt"] for a in known["answers"]] == [len(ids) for ids in encoded] and known["gamma"] == G
    assert any(n for a in known["answers"] for n in a["accepted"])
    for policy in (None, lambda c: scheduler.threshold(c, 0.5), lambda c: scheduler.fixed(c, 1)):
        real, again = {}, {}
        generate(target, drafter, encoded, sampling=s, policy=policy,
                 on_cycle=lambda r, c: c and real.setdefault(r.slot, []).append((c.verify_len, c.n_accepted, len(c.delivered))))
        clock = serve.VirtualClock()
        replay = serve.Replay(known["answers"], G, serve.h200_like(3, G), clock)
        ends = [Sampling(max_new_tokens=len(a["accepted"]) + 1) for a in known["answers"]]
        generate(replay, replay, [[2 + i] * len(ids) for i, ids in enumerate(encoded)], sampling=ends, policy=policy, gamma=G,
                 on_cycle=lambda r, c: c and again.setdefault(r.slot, []).append((c.verify_len, c.n_accepted, len(c.delivered))))
        assert again == real and sum(n for c in real.values() for _, n, _ in c) > 5


def test_h200_like_is_a_cost_curve():
    costs = serve.h200_like(1000, 7)
    assert costs.verify.shape == costs.draft.shape == (1001, 8) and (costs.draft[:, 0] == 0).all()
    assert (np.diff(costs.verify[1:], axis=0) >= 0).all() and (np.diff(costs.verify, axis=1) >= 0).all() and (costs.verify > 0).all()
    assert costs.verify[1, 7] == costs.verify[1, 0]  # a few rows are free
    assert costs.verify[1000, 7] > 4 * costs.verify[1000, 0]  # thousands are not
    assert np.isfinite(costs.sps(1000)[1000:]).all()


# ---------------------------------------------------------------------------------------------------------------------
# loops and arithmetic


@pytest.mark.parametrize("concurrency", [1, 5])
def test_closed_loop_keeps_so_many_under_way(concurrency):
    answers = answers_of()
    parts, costs = simulated(answers)
    log = serve.Log(parts.clock)
    log.engine = dspark.Engine(parts.target, parts.drafter, concurrency, 100, 7, None, None, log, 1024, parts.clock)
    seen, step = [], log.engine.step
    log.engine.step = lambda: (seen.append(len(log.engine.waiting) + len(log.engine.joining) + len(log.engine.active)), step())
    row = serve.closed_loop(log, iter(jobs_of(answers, [10 + i % 30 for i in range(500)])), concurrency, 20)
    assert set(seen) == {concurrency} and len(log.ended) >= 20
    assert not log.engine.busy and len(log.engine.free) == concurrency  # those under way were cancelled
    assert row["requests"] >= 20 and row["tokens_per_s"] > 0 and row["seconds"] > 0
    assert row["ttft_s_p50"] >= 0 and row["user_tokens_per_s_p5"] <= row["user_tokens_per_s_p50"] <= row["user_tokens_per_s_p95"]
    assert row["drafted"] == 7 and 0 < row["verify_budget"] <= 7 and 0 < row["waste"] < 1


def test_the_figures_by_hand():
    """Two users, plain decoding, costs of 1 s a pass whatever is in it: everything can be said in advance."""
    answers = answers_of(2)
    costs = scheduler.Costs(np.ones((3, 8)), np.zeros((3, 8)))
    clock = serve.VirtualClock()
    replay = serve.Replay(answers, 7, costs, clock)
    log = serve.Log(clock)
    log.engine = dspark.Engine(replay, None, 2, 100, 0, None, None, log, 1024, clock)
    log.submit(jobs_of(answers, [5])[0]), log.submit(jobs_of(answers, [5])[0])
    log.restart()
    while log.engine.busy:
        log.step()
    row = log.row()
    assert clock() == 1 + 4  # one pass for both prompts, four cycles
    assert row["tokens_per_s"] == 10 / 5 and row["user_tokens_per_s_p50"] == 1.0 and row["ttft_s_p50"] == 1.0
    assert (row["tau"], row["drafted"], row["verify_budget"], row["waste"], row["requests"]) == (1, 0, 0, 0, 2)
    assert row["draft_ms"] == 0 and row["verify_ms"] == pytest.approx(1000) and row["prefill_ms"] == pytest.approx(250)  # a cycle


def test_open_loop_waits_for_arrivals_and_counts_from_them():
    answers = answers_of()
    parts, costs = simulated(answers)
    log = serve.Log(parts.clock)
    log.engine = dspark.Engine(parts.target, parts.drafter, 2, 100, 7, None, None, log, 1024, parts.clock)
    jobs = jobs_of(answers, [20] * 8)
    serve.open_loop(log, iter(jobs), [0.0, 100.0, 100.0, 100.0, 100.0, 200.0], parts.wait)
    assert len(log.ended) == 6 and 200 < parts.clock() < 201
    came = sorted(log.came.values())
    assert came == [0.0, 100.0, 100.0, 100.0, 100.0, 200.0]
    waits = [log.first[r] - log.came[r] for r in log.ended]
    assert max(waits) > 3 * min(waits) > 0  # two slots: the third and fourth of four had to wait


def test_poisson_arrivals_have_the_rate_asked_for():
    answers = answers_of()
    policies = serve.make_policies(serve.h200_like(4, 7), None, 7, 0.4)
    args = Args()
    args.completions = 400
    row = serve.run_one(simulated(answers, slots=4)[0], policies["plain"], iter(jobs_of(answers, [10] * 400)), args, 4, 100, rate=2.0)
    # 400 exponential gaps: the sum is within 5 standard deviations, 25 %, of 200 s (but for a chance of 1e-6)
    assert row["requests"] == 400 and abs(row["seconds"] / 200 - 1) < 0.25


def test_workload_is_the_same_for_everybody_and_mixed():
    prompts = [([1], 100), ([2], 3), ([3], 100)]
    a, b = (serve.workload(prompts, 40, 0.7, 1000) for _ in range(2))
    first = [next(a) for _ in range(30)]
    assert first == [next(b) for _ in range(30)]
    assert [ids for ids, _ in first[:4]] == [[1], [2], [3], [1]] and len({s.seed for _, s in first}) == 30
    assert all(10 <= s.max_new_tokens <= 40 for ids, s in first if ids != [2]) and all(s.max_new_tokens == 3 for ids, s in first if ids == [2])
    assert len({s.max_new_tokens for _, s in first}) > 5
    assert serve.in_turn([("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("c", 6)]) == [1, 4, 5, 2, 6, 3]


def rows_of(**curves):
    """policy -> {concurrency: (tokens/s, user speed)}"""
    return [dict(policy=p, loop="closed", concurrency=c, tokens_per_s=t, user_tokens_per_s_p50=u, verify_budget=1.0)
            for p, curve in curves.items() for c, (t, u) in curve.items()]


def test_comparisons_by_hand():
    rows = rows_of(plain={1: (10, 10), 4: (30, 8)}, fixed={1: (20, 20), 4: (24, 6)}, mtp1={1: (12, 12), 4: (32, 8)},
                   adaptive={1: (19, 19), 4: (31, 9), 8: (50, 7)})
    assert serve.against_the_best(rows) == [(1, 0.95, "fixed", 1.9), (4, 31 / 30, "plain", 31 / 30)]
    gains = dict(serve.at_matched_throughput(rows))
    assert set(gains) == {1, 4}  # mtp1 never reaches 50 tokens/s
    assert gains[1] == pytest.approx(19 / (12 - 4 * 7 / 20) - 1)  # at 19 tokens/s on mtp1's line from (12, 12) to (32, 8)


def test_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = rows_of(plain={1: (10, 10), 4: (30, 8)}, adaptive={1: (19, 19), 4: (31, 9)})
    files = serve.draw(rows, tmp_path, "serve")
    assert [f.name for f in files] == ["serve_fig7.png", "serve_fig8.png"] and all(f.stat().st_size > 5000 for f in files)


# ---------------------------------------------------------------------------------------------------------------------
# policies under load, simulated


def throughput(answers, concurrency, names, gamma=7):
    out = {}
    for name in names:
        parts, costs = simulated(answers, gamma, concurrency)
        policy = serve.make_policies(costs, None, gamma, 0.4)[name]
        args = Args()
        args.completions = max(12, 3 * concurrency)  # or where the run happens to end moves the figures by 3 %
        load = serve.workload([([2 + i] * a["prompt"], 60) for i, a in enumerate(answers)], 60, 0.0, 0)
        out[name] = serve.run_one(parts, policy, load, args, concurrency, 100, concurrency=concurrency)
    return out


@pytest.mark.parametrize("chance", [0.35, 0.65])
def test_adaptive_is_near_the_best_at_every_load(chance):
    """On the H200-like curve, from one request to where plain decoding wins: at least 0.97 of the best of the others."""
    answers, budgets, winners = answers_of(12, chance=chance), [], set()
    for concurrency in (1, 16, 96):
        rows = throughput(answers, concurrency, ["plain", "fixed", "threshold", "scheduled", "adaptive"])
        ours = rows.pop("adaptive")
        best = max(rows, key=lambda name: rows[name]["tokens_per_s"])
        assert ours["tokens_per_s"] > 0.97 * rows[best]["tokens_per_s"], (concurrency, best)
        budgets.append(ours["verify_budget"])
        winners.add(best)
    assert budgets[2] < 0.5 * min(budgets[:2]) and len(winners) > 1  # as Fig. 8; and none of the others wins everywhere


# ---------------------------------------------------------------------------------------------------------------------
# from end to end


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(serve, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(cli, "NOISY", float("inf"))
    target = tiny_target(BYTES.n_vocab, max_len=256, tied=False)
    monkeypatch.setattr(smollm2, "load", lambda *args, **kw: (target, BYTES))
    path = tmp_path / "drafter.safetensors"
    drafting.save(tiny_drafter(target, G), path)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a", "domain": "x"}\n{"prompt": "b and c", "domain": "y"}\n')
    return ["--drafter", str(path), "--prompts", str(prompts), "--quick", "--max-new-tokens", "8"]


def call(capsys, *argv):
    code = 0
    try:
        serve.main(list(argv))
    except SystemExit as exit:
        code = exit.code
    return code, *capsys.readouterr()


def test_serve_from_end_to_end(small, capsys, tmp_path):
    code, out, err = call(capsys, "serve", *small, "--concurrency", "1", "3", "--rates", "500", "--out", str(tmp_path / "out"))
    assert code == 0, err
    last = json.loads(out.splitlines()[-1])
    assert [(r["policy"], r.get("concurrency", r.get("rate"))) for r in last["rows"]] == [(p, x) for x in (1, 3, 500.0) for p in serve.POLICIES]
    assert all(set(r) >= {"tokens_per_s", "user_tokens_per_s_p50", "verify_budget", "waste", "tau", "ttft_s_p50", "draft_ms"} for r in last["rows"])
    assert all(math.isfinite(v) for r in last["rows"] for v in r.values() if isinstance(v, float))
    kept = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert kept == last and "of the best of the others" in out and "\x1b" not in out
    plain = [r for r in last["rows"] if r["policy"] == "plain"]
    assert all(r["tau"] == 1 and r["verify_budget"] == r["drafted"] == 0 for r in plain)


def test_simulate_from_end_to_end(small, capsys, tmp_path):
    record = tmp_path / "records" / "acceptance.json"
    code, out, err = call(capsys, "simulate", *small, "--record", "--acceptance", str(record), "--concurrency", "1", "8",
                          "--out", str(tmp_path / "out"))
    assert code == 0, err
    assert record.is_file() and (tmp_path / "out" / "simulate.json").is_file()
    # from now on without a model, and the same each time
    code, again, err = call(capsys, "simulate", "--acceptance", str(record), "--concurrency", "1", "8", "--quick", "--max-new-tokens", "8")
    assert code == 0 and again.splitlines()[-1] == out.splitlines()[-1]
    code, out, err = call(capsys, "simulate", *small, "--acceptance", str(record), "--concurrency", "2", "--curve", "here", "--check")
    last = json.loads(out.splitlines()[-1])
    assert code == 0 and "simulated / real" in out and all(r["real_tokens_per_s"] > 0 for r in last["rows"])
    for r in last["rows"]:
        if r["policy"] in ("plain", "mtp1", "fixed", "threshold"):  # no costs in their decisions: tau is the real run's
            assert r["tau"] == pytest.approx(r["real_tau"], abs=1e-4), r["policy"]


@pytest.mark.parametrize("argv, words", [
    (["serve", "--concurrency", "0"], "at least 1"), (["serve", "--repeats", "0"], "at least 1"), (["serve", "--gamma", "4"], "1 to 3"),
    (["serve", "--rates", "0"], "above 0"), (["serve", "--concurrency"], "--concurrency"), (["serve", "--drafter", "none"], "nothing to compare"),
    (["serve", "--threshold", "2"], "--threshold"), (["simulate", "--acceptance", "nowhere.json"], "simulate --record"),
    (["simulate", "--temperature", "1"], "--temperature 0"),
])
def test_errors_are_one_line(small, capsys, argv, words):
    code, out, err = call(capsys, argv[0], *([] if argv[0] == "simulate" else small), *argv[1:])
    assert code == 2 and not out and err.count("\n") == 1 and err.startswith("bench.py: ") and words in err
