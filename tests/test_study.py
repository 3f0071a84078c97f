"""
Tests of study.py and its commands. No weights needed: a tiny random target, drafters with known behaviour, results in a
temporary folder. What the shipped files say about themselves is checked too.
"""
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import baselines
import bench
import cli
import corpus
import drafter as drafting
import study
from target import tiny_target

G = 3
DOMAINS = ["math", "math", "code", "code", "chat"]


@pytest.fixture
def setup():
    target = tiny_target(tied=False)
    encoding = SimpleNamespace(decode=lambda ids: str(ids))
    return cli.Setup(target, None, encoding, {})


@pytest.fixture
def prompts():
    return [(d, [i + 1, 5, 9, i + 1]) for i, d in enumerate(DOMAINS)]


@pytest.fixture
def args(tmp_path):
    return SimpleNamespace(drafters=None, repeats=2, max_new_tokens=40, batch=3, temperatures=[0.0, 1.0], gamma=None, results=tmp_path / "out",
                           command_line="python bench.py x", machine=dict(processor="x"))


@pytest.fixture
def shipped(setup, tmp_path, monkeypatch):
    """Two tiny drafters in a folder of their own, as if they were weights/."""
    for name, head in (("dspark", "markov"), ("eagle", "eagle"), ("dflash", "none")):
        drafter = drafting.tiny_drafter(setup.target, G, head, K=40)
        drafting.save(drafter, tmp_path / f"{name}.safetensors")
        (tmp_path / f"{name}.json").write_text(json.dumps(dict(calibration={"0.0": [1.5] * G, "1.0": [2.0] * G})))
    monkeypatch.setattr(cli, "DRAFTER", tmp_path / "dspark.safetensors")
    monkeypatch.setattr(study, "milliseconds", lambda step, repeats=1: (step(), 1.0)[1])  # runs what it would time, once


def rows_of(args, name):
    return json.loads((Path(args.results) / f"{name}.json").read_text())["rows"]


def test_decode_keeps_the_account_of_every_cycle(setup):
    drafter = drafting.tiny_drafter(setup.target, G, K=40)
    prompts = [[1, 2], [3], [4, 5, 6], [7]]
    blocks = study.decode(setup.target, drafter, prompts, 1.0, max_new_tokens=30, batch=3)
    for b in blocks:
        assert b.confidence.shape == (len(b.verified), G) and (b.accepted <= b.verified).all()
        # an answer of 30 tokens: one from prefill, then each cycle's accepted ones and its own
        assert (b.accepted + 1).sum() in (29, 30) or len(b.verified) < 29
        assert b.tau == pytest.approx(29 / len(b.verified)) or b.tau < 29 / len(b.verified) + 1e-9
        assert np.array_equal(b.survived().sum(1), b.accepted)
    c, o = study.whole(blocks)
    assert len(c) == sum((b.verified == G).sum() for b in blocks) and (np.diff(o.astype(int), axis=1) <= 0).all()
    # other batches, same draws
    again = study.decode(setup.target, drafter, prompts, 1.0, max_new_tokens=30, batch=1)
    assert [b.accepted.tolist() for b in again] == [b.accepted.tolist() for b in blocks]
    other = study.decode(setup.target, drafter, prompts, 1.0, max_new_tokens=30, batch=3, seed=100)
    assert [b.accepted.tolist() for b in other] != [b.accepted.tolist() for b in blocks]
    with pytest.raises(ValueError, match="too short"):
        study.whole(study.decode(setup.target, drafter, prompts[:1], 0.0, max_new_tokens=2))


def test_means_and_errors_by_hand():
    out = study.by_domain([1.0, 3.0, 2.0, 2.0, 5.0], DOMAINS)
    assert out["math"] == (2.0, pytest.approx(1.0)) and out["code"] == (2.0, 0.0) and out["chat"] == (5.0, 0.0)
    assert out["macro"] == (pytest.approx(3.0), pytest.approx(1 / 3)) and list(out)[-1] == "macro"


def test_table1(setup, prompts, args, shipped, capsys):
    study.table1(setup, prompts, args, study.Console(width=200))
    rows, text = rows_of(args, "table1"), capsys.readouterr().out
    assert {(r["drafter"], r["temperature"], r["domain"]) for r in rows} == {
        (n, t, d) for n in ("dspark", "dflash", "eagle", "lookup") for t in (0.0, 1.0) for d in ("math", "code", "chat", "macro")}
    assert all(r["tau"] >= 1 and r["stderr"] >= 0 for r in rows) and {r["gamma"] for r in rows} == {G, 7}
    macro = {(r["drafter"], r["temperature"]): r for r in rows if r["domain"] == "macro"}
    for (name, t), row in macro.items():
        mine = [r["tau"] for r in rows if r["drafter"] == name and r["temperature"] == t and r["domain"] != "macro"]
        assert row["tau"] == pytest.approx(np.mean(mine), abs=1e-4)
    assert macro["lookup", 0.0]["parameters"] == 0 < macro["dflash", 0.0]["parameters"] < macro["dspark", 0.0]["parameters"]
    assert "quoted: dspark, Qwen3-4B" in text and "dspark over dflash" in text
    assert (Path(args.results) / "table1.png").stat().st_size > 1000


def test_positions_multiply_to_tau(setup, prompts, args, shipped, capsys):
    study.positions(setup, prompts, args, study.Console(width=120))
    rows = [r for r in rows_of(args, "positions") if r["drafter"] == "dspark" and r["temperature"] == 0.0 and r["domain"] == "all"]
    product = 1.0
    for r in rows:
        product *= r["conditional"] or 0.0
        assert r["unconditional"] == pytest.approx(product, abs=1e-4)
    assert [r["position"] for r in rows] == [1, 2, 3] and rows[0]["blocks"] >= rows[1]["blocks"] >= rows[2]["blocks"]


@pytest.mark.parametrize("name", ["depth", "block", "draft"])
def test_other_figures_run_and_write(setup, prompts, args, shipped, capsys, name):
    study.COMMANDS[name](setup, prompts, args, study.Console(width=120))
    rows = rows_of(args, name)
    if name == "depth":
        assert {r["drafter"] for r in rows} == {"dspark", "dflash"} and {r["layers"] for r in rows} == {1}
    if name == "block":
        assert {r["gamma"] for r in rows if r["drafter"] == "dspark"} == {1, 2, 3} and all(1 <= r["tau"] <= 1 + r["gamma"] for r in rows)
    if name == "draft":
        eagle, ours = ([r for r in rows if r["drafter"] == n and r["gamma"] == 3 and "bytes" in r][0] for n in ("eagle", "dspark"))
        assert eagle["flops"] == 6 * eagle["bytes"] / 4 / 3  # float32, every number read at each of three positions and used in 2 FLOPs
        target, drafter = setup.target, drafting.load(cli.DRAFTER, setup.target)
        once = sum(p.numel() for n, p in drafter.named_parameters() if not n.startswith(("head.", "context_"))) + 40 * 32
        assert ours["bytes"] == 4 * (once + 3 * drafter.head.W2.weight.numel())
        cycles = [r for r in rows if "cycle_ms" in r]
        assert len(cycles) == 2 and all(0 < r["engine_ms"] < r["cycle_ms"] for r in cycles)
    assert all(r["draft_ms"] == 1.0 for r in rows if "draft_ms" in r)


def test_threshold_cuts_more_as_it_rises(setup, prompts, args, shipped, capsys):
    study.threshold(setup, prompts, args, study.Console(width=120))
    rows = [r for r in rows_of(args, "threshold") if r["domain"] == "all" and r["temperature"] == 1.0]
    verified = [r["verified_per_cycle"] for r in rows]
    assert len(rows) == 9 and verified[0] > 0.9 * G and verified == sorted(verified, reverse=True) and verified[-1] < verified[0]
    assert {r["drafter"] for r in rows} == {"dspark"}


def test_reliability_reports_on_questions_that_sts_never_saw(setup, prompts, args, shipped, capsys, monkeypatch):
    """Odd questions only; the constant is the even ones' mean."""
    seen = []
    whole = study.whole
    monkeypatch.setattr(study, "whole", lambda blocks: seen.append(len(blocks)) or whole(blocks))
    args.max_new_tokens = 60
    study.reliability(setup, prompts, args, study.Console(width=120))
    rows = rows_of(args, "reliability")
    assert seen == [3, 2, 6, 4]  # five questions: three even, two odd; two repeats at temperature 1
    assert {(r["temperature"], r["position"]) for r in rows} == {(t, k) for t in (0.0, 1.0) for k in (1, 2, 3)}
    assert all({"ece_raw", "ece_sts", "auc", "brier_raw", "brier_sts", "brier_constant", "ece_constant"} <= set(r) for r in rows)
    (args.results.parent / "dspark.json").write_text("{}")
    with pytest.raises(ValueError, match="train.py calibrate"):
        study.reliability(setup, prompts, args, study.Console(width=120))


def test_what_a_figure_shows_in_the_terminal(capsys):
    study.draw_text(study.Console(width=100), {"up": [(0, 0), (1, 1)], "flat": [(0, 0), (1, 0)], "gap": [(0.5, float("nan"))]}, "x", "y", 21, 3)
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].endswith("|" + " " * 20 + "a") and lines[2].endswith("|*" + " " * 19 + "b") and "a up  b flat" in lines[5]
    study.draw_text(study.Console(), {"none": []}, "x", "y")  # nothing to draw is no error


@pytest.mark.parametrize("argv, message", [
    (["table1", "--repeats", "0"], "--repeats"), (["table1", "--prompts", "/nowhere"], "cannot read"), (["depth", "--batch", "0"], "--batch"),
])
def test_what_cannot_be_measured_is_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        bench.main(argv)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_evaluation_prompts_are_disjoint_from_training():
    """A shipped drafter's record names the evaluation prompts that its training left out: those must be the ones that bench.py
    decodes today. And no calibration question shares a run of 13 words with them."""
    known = corpus.read_prompts(corpus.PROMPTS)
    for path in Path(cli.DRAFTER).parent.glob("*.json"):
        assert json.loads(path.read_text())["evaluation_prompts"] == corpus.fingerprint(known), path
    words = lambda text: text.lower().split()  # noqa: E731
    asked = {tuple(words(p)[i : i + 13]) for _, p in known for i in range(max(1, len(words(p)) - 12))}
    for _, question in corpus.read_prompts(study.QUESTIONS):
        w = words(question)
        assert not any(tuple(w[i : i + n]) in asked for n in {len(a) for a in asked} for i in range(len(w) - n + 1)), question
    assert corpus.fingerprint(known[1:]) != corpus.fingerprint(known)


def test_prompt_lookup_is_the_free_baseline(setup):
    assert study.parameters(baselines.PromptLookup(7)) == 0
    assert study.propose_ms(setup.target, baselines.PromptLookup(7), 3) < 1000
