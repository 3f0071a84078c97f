"""
Tests of the command line (cli.py) and of the benchmark's arithmetic (bench.py). Run: python -m pytest tests/test_cli.py

main() runs in this process, with tiny or scripted models in place of the real one, so that no weights are needed.
"""
import argparse
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import bench
import cli
import drafter as drafting
import dspark
import scheduler
import smollm2
from drafter import tiny_drafter
from dspark import Result, Sampling, generate
from target import tiny_target
from test_dspark import BYTES, ScriptedDrafter, ScriptTarget, encoding_of

ROOT = Path(cli.__file__).parent
GAMMA = 3


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """Away from the user's cache, and without memory settings that would outlive the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(cli, "NOISY", float("inf"))  # a busy machine is no failure of a test
    monkeypatch.setattr(bench, "keep_freed_memory", lambda: None)


@pytest.fixture(scope="module")
def tiny():
    return tiny_target(BYTES.n_vocab, max_len=512, tied=False)


@pytest.fixture
def small(monkeypatch, tmp_path, tiny):
    """A tiny random model instead of the real one; returns its options, --drafter among them."""
    monkeypatch.setattr(smollm2, "load", lambda *args, **kw: (tiny, BYTES))
    path = tmp_path / "drafter.safetensors"
    drafting.save(tiny_drafter(tiny, GAMMA), path)
    return ["--drafter", str(path), "--max-new-tokens", "12"]


@pytest.fixture
def says(monkeypatch):
    """says(text): from now on the model answers every prompt "hi" with that text and EOS; drafts are wrong at every 4th place."""
    def patch(text, n=1, max_len=4096, confidence=lambda slot, place: 0.9, wrong=lambda slot, place: place % 4 == 0):
        script = smollm2.chat(BYTES, "hi") + BYTES.encode_ordinary(text) + [smollm2.EOS] + [5] * (GAMMA + 2)
        drafter = ScriptedDrafter([script] * n, BYTES.n_vocab, GAMMA, wrong, confidence=confidence)
        setup = cli.Setup(ScriptTarget([script] * n, BYTES.n_vocab, max_len), drafter, BYTES, {})
        plain = cli.Setup(setup.target, None, BYTES, {})
        monkeypatch.setattr(cli, "load", lambda target, drafter, device, dtype: plain if drafter == "none" else setup)
    return patch


@pytest.fixture
def call(capsys):
    """call(option, ..) -> exit code, standard output, standard error."""
    def run(*argv, main=cli.main):
        with pytest.raises(SystemExit) as exit:
            main(list(argv))
        return exit.value.code, *capsys.readouterr()
    return run


# ---------------------------------------------------------------------------------------------------------------------
# options and errors


def test_defaults():
    a, s = cli.parse([]), Sampling()
    assert (a.prompt, a.target, a.drafter, a.device, a.dtype, a.policy, a.gamma) == (None, None, None, "auto", "auto", "scheduled", None)
    assert (a.temperature, a.top_k, a.top_p, a.seed, tuple(a.stop)) == (s.temperature, s.top_k, s.top_p, s.seed, s.stop)
    assert not (a.trace or a.json or a.no_compare or a.profile) and a.max_new_tokens == 256
    a = cli.parse(["--prompt", "a", "--prompt", "b", "--stop", "x", "--stop", "y", "--temperature", "-1"])
    assert a.prompt == ["a", "b"] and a.stop == ["x", "y"] and a.temperature == -1
    assert cli.parse([]).stop == []  # a list default is not shared between calls


@pytest.mark.parametrize("options, words", [
    (["--prompt", ""], "empty prompt"),
    (["--prompt", " \n\t"], "empty prompt"),
    (["--prompt", "hi", "--prompt", ""], "empty prompt"),
    (["--gamma", "4"], "blocks of up to 3"),
    (["--gamma", "-1"], "gamma -1"),
    (["--gamma", "2", "--drafter", "none"], "needs a drafter"),
    (["--drafter", "missing.safetensors"], "no drafter at missing.safetensors"),
    (["--drafter", __file__], "is not a drafter"),
    (["--temperature", "-1"], "temperature"),
    (["--temperature", "nan"], "temperature"),
    (["--temperature", "1e39"], "temperature"),
    (["--top-p", "0"], "top_p"),
    (["--top-p", "1.5"], "top_p"),
    (["--top-k", "-2"], "top_k"),
    (["--stop", ""], "stop"),
    (["--max-new-tokens", "5000"], "context"),
    (["--max-new-tokens", "0"], "max_new_tokens"),
    (["--device", "abacus"], "abacus"),
    (["--threshold", "1.01"], "threshold"),
    (["--threshold", "-0.5"], "threshold"),
    (["--threshold", "nan"], "threshold"),
    (["--seed", str(2**64)], "dspark.py: "),
])
def test_errors_are_one_line_and_exit_code_2(small, call, options, words):
    prompt = [] if "--prompt" in options else ["--prompt", "hi"]
    code, out, err = call(*small, *prompt, *options)
    assert code == 2 and not out
    assert err.count("\n") == 1 and err.startswith("dspark.py: ") and words in err and "Traceback" not in err


def test_a_truncated_drafter_and_one_of_another_model_are_refused(small, call, tmp_path):
    whole = Path(small[1]).read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    drafting.save(tiny_drafter(tiny_target(40, tied=False), GAMMA, head="rnn", K=20), tmp_path / "other.safetensors")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    for name in ("half", "empty"):
        code, out, err = call("--prompt", "hi", "--drafter", str(tmp_path / f"{name}.safetensors"))
        assert code == 2 and not out and err.count("\n") == 1 and "restore or retrain" in err
    # smaller ids than this target's are no contradiction, another width is
    with pytest.raises(ValueError, match="not a drafter for this target"):
        wide = tiny_target(40, tied=False)
        wide.config.d_model = 48
        drafting.load(tmp_path / "other.safetensors", wide)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(small, call):
    code, out, err = call("--prompt", "hi", "--device", "cuda")
    assert code == 2 and not out and err.count("\n") == 1 and "--device cpu" in err


def test_nothing_on_standard_input(small, call, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = call(*small)
    assert code == 2 and not out and err.count("\n") == 1 and "--prompt" in err


def test_a_missing_target(call):
    code, out, err = call("--prompt", "hi", "--target", "nowhere.gguf")
    assert code == 2 and not out and err.count("\n") == 1 and "nowhere.gguf" in err


def test_a_target_that_is_no_gguf(call):
    code, out, err = call("--prompt", "hi", "--target", __file__)
    assert code == 2 and not out and err.count("\n") == 1 and "not a readable GGUF" in err


@pytest.mark.parametrize("options", [["--prompt", "  "], ["--prompt", "hi", "--target", "nowhere.gguf"]])
def test_errors_of_the_script_itself(options):
    done = subprocess.run([sys.executable, "dspark.py", *options], cwd=ROOT, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1 and done.stderr.startswith("dspark.py: ")


# ---------------------------------------------------------------------------------------------------------------------
# output


KEYS = {"text", "ids", "tau", "cycles", "tokens_per_s", "plain_tokens_per_s", "identical_to_plain", "finish", "ledger_ms"}


@pytest.mark.parametrize("policy", cli.POLICIES)
def test_json_is_a_line_per_prompt(small, call, tiny, policy):
    code, out, err = call(*small, "--prompt", "one", "--prompt", "two and more", "--json", "--policy", policy)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and not err and len(rows) == 2 and all(set(r) == KEYS for r in rows)
    plain = generate(tiny, None, [smollm2.chat(BYTES, p) for p in ("one", "two and more")], sampling=Sampling(max_new_tokens=12))
    for r, p in zip(rows, plain):
        assert r["ids"] == p.ids and r["text"] == BYTES.decode([i for i in p.ids if i != smollm2.EOS]) and r["finish"] == p.finish
        assert r["tau"] == (len(r["ids"]) - 1) / r["cycles"] and r["tokens_per_s"] > 0
        assert set(r["ledger_ms"]) == {"prefill", "draft", "schedule", "verify", "commit"}
        if policy == "plain":
            assert r["identical_to_plain"] is None and r["plain_tokens_per_s"] is None and r["tau"] == 1
        else:
            assert r["identical_to_plain"] is True and r["plain_tokens_per_s"] > 0


def test_json_without_a_comparison(small, call):
    _, out, _ = call(*small, "--prompt", "one", "--json", "--no-compare")
    r = json.loads(out)
    assert r["plain_tokens_per_s"] is None and r["identical_to_plain"] is None
    _, out, _ = call(*small, "--prompt", "one", "--json", "--temperature", "1")
    r = json.loads(out)
    assert r["plain_tokens_per_s"] > 0 and r["identical_to_plain"] is None  # the law is the same, the draws are not


def test_every_prompt_of_a_batch_has_its_own_seed(small, call):
    _, out, _ = call(*small, *["--prompt", "same"] * 3, "--json", "--temperature", "1", "--policy", "fixed", "--seed", "5")
    ids = [json.loads(line)["ids"] for line in out.splitlines()]
    assert ids[0] != ids[1] != ids[2]
    _, out, _ = call(*small, "--prompt", "same", "--json", "--temperature", "1", "--policy", "fixed", "--seed", "6")
    assert json.loads(out)["ids"] == ids[1]


def test_the_answer_and_its_account(says, call):
    text = "Hé\tllo, 日本 🙂!\r\n[bold]two[/bold] :smile: lines"
    says(text)
    code, out, err = call("--prompt", "hi", "--policy", "fixed")
    assert code == 0 and not err and "\x1b" not in out  # no colour codes into a pipe
    assert out.startswith(text + "\n")
    for words in ("finish: eos", "tau", "accepted", "ms a cycle", "speed-up", "the same tokens as plain decoding", "colours:"):
        assert words in out
    _, out, _ = call("--prompt", "hi", "--policy", "fixed", "--no-compare")
    assert out.startswith(text + "\n") and "speed-up" not in out
    _, out, _ = call("--prompt", "hi", "--policy", "plain")
    assert out.startswith(text + "\n") and "speed-up" not in out
    _, out, _ = call("--prompt", "hi", "--policy", "fixed", "--stop", "日")
    assert out.startswith("Hé\tllo, \n") and "finish: stop" in out


def test_several_prompts_print_their_answers_in_order(says, call):
    says("an answer", n=2)
    code, out, _ = call("--prompt", "hi", "--prompt", "hi", "--policy", "threshold")
    assert code == 0 and out.count("> hi\nan answer\n") == 2 and out.count("finish: eos, eos") == 1


def test_short_answers_do_not_divide_by_zero(says, call):
    says("x")
    for options in (["--max-new-tokens", "1"], ["--stop", "x"], ["--json", "--max-new-tokens", "1"], ["--json", "--stop", "x"],
                    ["--trace", "--stop", "x"]):
        code, out, err = call("--prompt", "hi", "--policy", "fixed", *options)
        assert code == 0 and not err
        if "--json" in options:
            assert json.loads(out)["tau"] == 0 and json.loads(out)["tokens_per_s"] == 0
    says("")  # EOS at once
    assert call("--prompt", "hi", "--policy", "fixed")[0] == 0


def test_a_prompt_that_just_fits_the_context_runs(says, call):
    says("abcdef", max_len=len(smollm2.chat(BYTES, "hi")) + 3)  # less room than the warm-up would like
    code, out, _ = call("--prompt", "hi", "--policy", "fixed", "--max-new-tokens", "3")
    assert code == 0 and out.startswith("abc\n")
    assert call("--prompt", "hi", "--policy", "fixed", "--max-new-tokens", "4")[0] == 2


def test_ctrl_c_keeps_what_was_produced(says, call, monkeypatch):
    says("a long answer that is never finished")
    show, calls = cli.Streamer.__call__, []

    def interrupted(self, request, cycle):
        show(self, request, cycle)
        calls.append(cycle)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.Streamer, "__call__", interrupted)
    code, out, err = call("--prompt", "hi", "--policy", "fixed")
    text = out.split("\n")[0]
    assert code == 130 and not err and "a long answer that is never finished".startswith(text) and 3 < len(text) < 12
    assert "finish: cancelled" in out and "speed-up" not in out


def test_ctrl_c_during_the_warm_up_ends_the_run(says, call, monkeypatch):
    says("text")
    real, calls = dspark.generate, []

    def stopped_at(nth):
        def run(*args, **kw):
            calls.append(1)
            results = real(*args, **kw)
            for r in results:
                r.finish = "cancelled" if len(calls) == nth else r.finish
            return results
        calls.clear()
        monkeypatch.setattr(dspark, "generate", run)

    stopped_at(1)
    assert call("--prompt", "hi", "--policy", "fixed") == (130, "", "") and len(calls) == 1
    for nth in (3, 4):  # plain decoding's warm-up, plain decoding: the answer is there, the comparison is not
        stopped_at(nth)
        code, out, _ = call("--prompt", "hi", "--policy", "fixed")
        assert code == 130 and out.startswith("text\n") and "speed-up" not in out and len(calls) == nth


def test_a_difference_from_plain_decoding_is_told(says, call, monkeypatch):
    says("abcdefgh")
    real = dspark.generate

    def off(target, drafter, *args, **kw):
        results = real(target, drafter, *args, **kw)
        if drafter is None:
            results[0].ids[3] += 1
        return results

    monkeypatch.setattr(dspark, "generate", off)
    _, out, _ = call("--prompt", "hi", "--policy", "fixed")
    assert "parts from plain decoding at token 3, top-2 logit margin there 50" in out
    _, out, _ = call("--prompt", "hi", "--policy", "fixed", "--json")
    assert json.loads(out)["identical_to_plain"] is False


def test_trace_is_a_line_per_cycle(says, call):
    first = len(smollm2.chat(BYTES, "hi"))  # place of the first token of the answer
    says("abcdefghi", confidence=lambda slot, place: 0.25 if place == first + 6 else 0.9, wrong=lambda slot, place: place == first + 3)
    code, out, _ = call("--prompt", "hi", "--policy", "threshold", "--threshold", "0.5", "--trace")
    assert code == 0 and "\x1b" not in out
    assert out.split("\n")[:6] == [
        "prefill draws 'a'",
        "  1 'a' -> 'b' c=0.90 a=0.90 'c' c=0.90 a=0.81 'e' c=0.90 a=0.73  accepted 2/3, correction 'd'",
        "  2 'd' -> 'e' c=0.90 a=0.90 'f' c=0.90 a=0.81 | 'g' c=0.25 a=0.20  accepted 2/2, bonus 'g'",
        "  3 'g' -> 'h' c=0.90 a=0.90 'i' c=0.90 a=0.81 '<|im_end|>' c=0.90 a=0.73  accepted 3/3, bonus '\\x02'",
        "",
        "abcdefghi",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# the stream


def streamed(ids, encoding, n=60, gamma=GAMMA, period=99, terminal=False, **kw):
    """-> what the Streamer printed, the Result."""
    script = [[5] + ids + [3 + ord("z")] * (gamma + 2)]
    drafter = ScriptedDrafter(script, encoding.n_vocab, gamma, lambda slot, place: place % period == 0)
    file = io.StringIO()
    streamer = cli.Streamer(Console(file=file, highlight=False, force_terminal=terminal, color_system="truecolor" if terminal else None),
                            encoding, trace=False)
    [result] = generate(ScriptTarget(script, encoding.n_vocab), drafter, [[5]], sampling=Sampling(max_new_tokens=n, **kw),
                        encoding=encoding, on_cycle=streamer)
    return file.getvalue(), result


PIECES = encoding_of("日本".encode(), "日本語".encode(), b"xEN", b"Dy", b" END.", "🙂 E".encode(), b"\xe6\x97")


def ids_of(*pieces):
    return [PIECES.encode_single_token(p) for p in pieces]


@pytest.mark.parametrize("stop", [(), ("END",), ("日本語",), ("🙂", "END"), ("é",), ("本",), ("\t",), ("END.\n", "zzz")])
@pytest.mark.parametrize("gamma", [1, GAMMA])
def test_the_stream_is_the_text(stop, gamma):
    whole = "né\tfor\r\n日本語 🙂 日 and EN EN END. after\n"
    scripts = [
        BYTES.encode_ordinary(whole),  # a token per byte: characters of up to four tokens
        ids_of("日本".encode(), b"xEN", b"Dy", b"\n"),
        ids_of(b"a", b" END.", b"b"),
        ids_of(b"\xe6\x97", b"\xa5", "日本語".encode(), "🙂 E".encode(), b"N", b"D"),
        ids_of(b"\xe6", b"x", b"\xff", b"\xe6\x97", b"E", b"N", b"D", b"\xf0"),  # not UTF-8
    ]
    for ids in scripts:
        for period in (1, 2, 3, 99):
            for n in (1, 2, 4, 5, 6, 9, 60):  # cut anywhere, also within a character
                for end in ([], [smollm2.EOS]):
                    out, result = streamed(ids + end, PIECES, n, gamma, period, stop=stop)
                    assert out == result.text and not any(s in out for s in stop)


def test_a_possible_stop_string_is_held_back_until_it_is_none():
    shown = []
    script = [[5] + BYTES.encode_ordinary("abEN, EN") + [smollm2.EOS] * 6]
    file = io.StringIO()
    streamer = cli.Streamer(Console(file=file), BYTES, trace=False)

    def on_cycle(request, cycle):
        streamer(request, cycle)
        shown.append((len(request.result.ids), file.getvalue()))

    generate(ScriptTarget(script, BYTES.n_vocab), None, [[5]], sampling=Sampling(stop=("END",)), encoding=BYTES, on_cycle=on_cycle)
    assert shown[:5] == [(1, ""), (2, ""), (3, "a"), (4, "ab"), (5, "abE")] and shown[-1][1] == "abEN, EN"


def test_colours_only_on_a_terminal():
    ids = BYTES.encode_ordinary("abcdefghij")
    out, _ = streamed(ids, BYTES, n=10, period=4, terminal=True)  # a first; bcd and a bonus e; fg, correction h
    assert "\x1b[2ma\x1b[0m" in out and "\x1b[32m" in out and "\x1b[33m" in out and "\x1b[36m" in out  # dim, green, yellow, cyan
    assert "\x1b" not in streamed(ids, BYTES, n=10, period=4)[0]


# ---------------------------------------------------------------------------------------------------------------------
# helpers


def test_first_difference(tiny):
    prompt, plain = [3, 1, 4], [7, 7, 9, 5]
    assert cli.first_difference(tiny, prompt, list(plain), plain) is None
    at, margin = cli.first_difference(tiny, prompt, [7, 7, 8, 5], plain)
    x = torch.tensor([3, 1, 4, 7, 7])
    logits, _ = tiny(x, torch.zeros_like(x), torch.arange(5), tiny.new_cache(1, 5))
    top = logits[-1].topk(2).values
    assert at == 2 and abs(margin - float(top[0] - top[1])) < 1e-4 and margin > 0
    # one that ends early is no less different
    assert cli.first_difference(tiny, prompt, [7, 7], plain)[0] == 2 and cli.first_difference(tiny, prompt, plain + [1], plain)[0] == 4
    assert cli.first_difference(tiny, prompt, [8], plain)[0] == 0


def test_tokens_per_s_leaves_prefill_out():
    ledger = dict(prefill=100.0, draft=0.5, schedule=0.25, verify=1.0, commit=0.25)
    assert cli.tokens_per_s([Result(ids=[1] * 5, cycles=2, ledger=ledger), Result(ids=[1] * 3, cycles=2, ledger=ledger)]) == 3.0
    assert cli.tokens_per_s([Result(ids=[1], ledger=dict(prefill=1.0))]) == 0.0
    assert cli.tokens_per_s([Result(ids=[], ledger=ledger), Result(ids=[1] * 7, ledger=ledger)]) == 3.0  # a stop took all: not -1


def test_make_policy(tiny, monkeypatch):
    setup = cli.Setup(tiny, tiny_drafter(tiny, GAMMA), BYTES, {0.0: [1.0, 1.0, 1.0], 1.0: [9.0, 9.0, 9.0]})
    c = torch.tensor([[0.9, 0.3, 0.9]])
    assert cli.make_policy("fixed", setup, GAMMA, 1, 0.0) is None
    assert cli.make_policy("scheduled", setup, 0, 1, 0.0) is None  # nothing to schedule
    assert cli.make_policy("plain", setup, GAMMA, 1, 0.0)(c).tolist() == [0]
    assert cli.make_policy("threshold", setup, GAMMA, 1, 0.0, 0.3)(c).tolist() == [3]
    assert cli.make_policy("threshold", setup, GAMMA, 1, 0.0, 0.5)(c).tolist() == [1]
    asked, used = [], []

    def cached(target, drafter, slots, gamma, path, again, show):
        asked.append((slots, gamma, again, path))
        flat = {x: 1.0 for x in cli.grid(slots, gamma)}
        return scheduler.costs_from(flat, {x: 0.1 for x in flat if x[1]}, slots, gamma)

    monkeypatch.setattr(cli, "cached_costs", cached)
    monkeypatch.setattr(scheduler, "apply_sts", lambda c, t: used.append(t) or c)
    for temperature in (0.0, 0.2, 0.6, 5.0):  # the calibration of the nearest temperature
        assert cli.make_policy("scheduled", setup, GAMMA, 1, temperature, again=True)(c).tolist() == [3]
    assert used == [[1.0] * 3] * 2 + [[9.0] * 3] * 2
    assert asked[0] == (1, GAMMA, True, smollm2.cache_dir() / "sps.json")
    for name, kind in (("async", scheduler.Async), ("adaptive", scheduler.Adaptive)):
        policy = cli.make_policy(name, setup, GAMMA, 1, 1.0)
        assert type(policy) is kind and policy.temperatures == [9.0] * 3
        assert policy.begin(1, GAMMA) == GAMMA and policy(c).tolist() == [3]
        assert cli.make_policy(name, setup, GAMMA, 1, 1.0) is not policy  # it remembers: none is shared
    del used[4:]
    setup.calibration = {}
    assert cli.make_policy("scheduled", setup, GAMMA, 1, 1.0)(c).tolist() == [3] and len(used) == 4


def test_profile_alone_measures_and_shows(small, call):
    code, out, err = call(*small, "--profile", "--slots", "3")
    assert code == 0 and not err
    lines = out.splitlines()
    assert any(line.split()[:1] == ["3"] and len(line.split()) == 2 * GAMMA + 2 for line in lines)  # a row of the table for R = 3 ..
    assert sum("\u2588" in line for line in lines) == len(cli.grid(3, GAMMA))  # .. and a bar for every point measured
    assert any(line.startswith("T = ") and "mean error" in line for line in lines)
    assert (smollm2.cache_dir() / "sps.json").is_file()
    for options in (["--slots", "0"], ["--gamma", "9"], ["--drafter", "none"]):
        code, out, err = call(*small, "--profile", *options)
        assert code == 2 and not out and err.count("\n") == 1


def test_a_flat_profile_is_pointed_out():
    out = io.StringIO()
    flat = {x: 0.01 for x in cli.grid(4, 3)}
    cli.show_costs(Console(file=out, width=120), flat, {x: 0.001 for x in flat if x[1]}, 0.02)
    assert "flat" in out.getvalue() and re.search(r"T = 10.0 \+ -?0.000 N ms, mean error 0.0%", out.getvalue())
    out.truncate(0)
    cli.show_costs(Console(file=out, width=120), {x: 0.02 + 0.001 * x[0] * (1 + x[1]) for x in flat}, {(1, 1): 0.001}, 0.02)
    assert "flat" not in out.getvalue() and "T = 20.0 + 1.000 N ms" in out.getvalue()


def test_load_reads_the_calibration_beside_the_drafter(small):
    path = Path(small[1])
    assert cli.load(drafter=path).calibration == {}
    path.with_suffix(".json").write_text('{"calibration": {"0.0": [1, 2, 3], "1.0": [4, 5, 6]}}')
    setup = cli.load(drafter=path)
    assert {t: v.tolist() for t, v in setup.calibration.items()} == {0.0: [1, 2, 3], 1.0: [4, 5, 6]} and setup.drafter.gamma == GAMMA
    for bad in ('[]', '{"calibration": {"0.0": [1, 2]}}', '{"calibration": {"0.0": ["x", 1, 1]}}', '{"calibration": {"0.0": {"a": 1}}}',
                '{"calibration": {"0.0": [1, -2, 3]}}', '{"calibration": {"warm": [1, 2, 3]}}', '{'):
        path.with_suffix(".json").write_text(bad)
        with pytest.raises(ValueError, match=r"dspark.json is not this drafter's record|is not this drafter's record"):
            cli.load(drafter=path)
    path.with_suffix(".json").unlink()
    assert cli.load(drafter="none").drafter is None


# ---------------------------------------------------------------------------------------------------------------------
# bench.py


def test_read_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "domain": "x"}\n\n  \n{"turns": ["b", "c"], "category": 7}\r\n{"prompt": "line \u2028 sep\u0085"}\n'
                    '{"prompt": "both", "turns": ["no"]}', encoding="utf-8", newline="")
    assert bench.read_prompts(path) == [("x", "a"), ("7", "b"), ("all", "line \u2028 sep\u0085"), ("all", "both")]
    path.write_text('\ufeff{"prompt": "after a byte order mark", "domain": "[red]code"}', encoding="utf-8")
    assert bench.read_prompts(path) == [("[red]code", "after a byte order mark")]
    path.write_text('{"prompt": "a", "domain": "macro"}', encoding="utf-8")
    with pytest.raises(ValueError, match="macro"):
        bench.read_prompts(path)
    kept = bench.read_prompts(bench.PROMPTS)
    assert len(kept) >= 12 and {d for d, _ in kept} == {"math", "code", "chat"}


@pytest.mark.parametrize("line", ["{", "[]", '["prompt"]', '"prompt"', "3", "null", "{}", '{"prompt": ""}', '{"prompt": " "}',
                                  '{"prompt": 5}', '{"turns": []}', '{"turns": "hello"}', '{"turns": [1]}', '{"prompt": null}'])
def test_read_prompts_names_the_bad_line(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: ") as error:
        bench.read_prompts(path)
    assert "\n" not in str(error.value)


def test_read_prompts_without_prompts(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in (("empty", "holds no prompts"), ("binary", "cannot read"), ("missing", "cannot read"), (".", "cannot read")):
        with pytest.raises(ValueError, match=words):
            bench.read_prompts(tmp_path / name)


def result(tokens, cycles, draft, schedule, verify, commit):
    return Result(ids=[0] * (tokens + 1), cycles=cycles,
                  ledger=dict(prefill=1000.0, draft=draft, schedule=schedule, verify=verify, commit=commit))


def test_summarize_by_hand():
    runs = {
        # 10 tokens in 1 s: 10 tokens/s, 100 ms a verify. Two prompts are added up.
        ("plain", 0, "math"): [result(4, 4, 0, 0, 0.4, 0), result(6, 6, 0, 0, 0.6, 0)],
        # 10 tokens in 4 cycles and 0.6 s: tau 2.5, 16.7 tokens/s, 120 ms a verify; ceiling 2.5 * 100 / 120
        ("fast", 0, "math"): [result(4, 2, 0.04, 0.01, 0.2, 0.01), result(6, 2, 0.04, 0.01, 0.28, 0.01)],
        # 5 tokens/s, 200 ms; 8 tokens/s at tau 2 and 200 ms: speed-up 1.6 of at most 2
        ("plain", 0, "code"): [result(10, 10, 0, 0, 2.0, 0)],
        ("fast", 0, "code"): [result(10, 5, 0.2, 0, 1.0, 0.05)],
    }
    rows = bench.summarize(runs, ["plain", "fast"], 0.0, 1)
    assert [(r["policy"], r["domain"], r["prompts"]) for r in rows] == [
        (p, d, n) for p in ("plain", "fast") for d, n in (("math", 2), ("code", 1), ("macro", 3))]
    plain_math, plain_code, plain_macro, math, code, macro = rows
    for r in (plain_math, plain_code, plain_macro):
        assert (r["tau"], r["speedup"], r["ceiling"], r["ceiling_fraction"]) == (1, 1, 1, 1)
    assert (plain_math["tokens_per_s"], plain_code["tokens_per_s"], plain_macro["tokens_per_s"]) == (10, 5, 7.5)
    assert (math["tau"], math["tokens_per_s"], math["speedup"]) == (2.5, 16.6667, 1.6667)
    assert (math["ceiling"], math["ceiling_fraction"]) == (2.0833, 0.8)
    assert (math["draft_ms"], math["schedule_ms"], math["verify_ms"], math["commit_ms"]) == (20, 5, 120, 5)
    assert (code["tau"], code["tokens_per_s"], code["speedup"], code["ceiling"], code["ceiling_fraction"]) == (2, 8, 1.6, 2, 0.8)
    assert (macro["tau"], macro["speedup"], macro["ceiling"]) == (2.25, 1.6333, 2.0417)
    json.dumps(rows)


def test_summarize_takes_medians_and_ranges_over_repeats():
    runs = {}
    for repeat, (slow, fast) in enumerate([(1.0, 0.5), (1.0, 0.25), (2.0, 0.2)]):  # speed-ups 2, 4, 10
        runs["plain", repeat, "all"] = [result(10, 10, 0, 0, slow, 0)]
        runs["fast", repeat, "all"] = [result(10, 2, 0, 0, fast, 0)]
    row = bench.summarize(runs, ["plain", "fast"], 1.0, 3)[2]
    assert row["speedup"] == 4 and row["speedup_range"] == [2, 10] and row["repeats"] == 3 and row["temperature"] == 1.0
    assert row["tokens_per_s"] == 40 and row["tokens_per_s_range"] == [20, 50] and row["tau_range"] == [5, 5]


def test_summarize_where_nothing_was_decoded():
    nothing = dict(prefill=1.0, draft=0.0, schedule=0.0, verify=0.0, commit=0.0)
    runs = {(name, 0, "all"): [Result(ids=[2], ledger=nothing)] for name in ("plain", "fast")}
    assert [r["speedup"] for r in bench.summarize(runs, ["plain", "fast"], 0.0, 1)] == [0.0] * 4


@pytest.mark.parametrize("gamma, wanted", [
    (1, ["plain", "fixed 1", "threshold 0.4 of 1", "scheduled 1", "adaptive 1"]),
    (2, ["plain", "fixed 2", "threshold 0.4 of 2", "scheduled 2", "adaptive 2"]),
    (7, ["plain", "fixed 4", "fixed 7", "threshold 0.4 of 7", "scheduled 4", "scheduled 7", "adaptive 7"]),
])
def test_policies_measured(tiny, gamma, wanted, monkeypatch):
    flat = lambda target, drafter, n, gamma, *rest: scheduler.Costs(np.ones((n + 1, gamma + 1)), np.zeros((n + 1, gamma + 1)))  # noqa: E731
    monkeypatch.setattr(cli, "cached_costs", flat)
    setup = cli.Setup(tiny, tiny_drafter(tiny, 7), BYTES, {})
    names = bench.policies(setup, argparse.Namespace(gamma=gamma, threshold=0.4, policies=None), 0.0)
    assert list(names) == wanted and names["plain"] == (None, None, None)
    for name, (drafter, g, policy) in names.items():
        assert name == "plain" or (drafter is setup.drafter and str(g) in name and g <= gamma)


def run_bench(call, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    return call(main=lambda argv: bench.main())


def test_bench_from_end_to_end(small, call, monkeypatch, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "domain": "x"}\n{"prompt": "b", "domain": "y"}\n')
    code, out, _ = run_bench(call, monkeypatch, "--drafter", small[1], "--prompts", str(path), "--repeats", "2", "--max-new-tokens", "6")
    last = json.loads(out.splitlines()[-1])
    assert code in (0, None) and "\x1b" not in out and "every policy gave the ids of plain decoding" in out
    assert set(last) == {"rows", "machine"} and set(last["machine"]) >= {"processor", "threads", "dtype", "torch", "date"}
    names = ["plain", "fixed 3", "threshold 0.4 of 3", "scheduled 3", "adaptive 3"]
    assert [(r["temperature"], r["policy"], r["domain"]) for r in last["rows"]] == [
        (t, p, d) for t in (0.0, 1.0) for p in names for d in ("x", "y", "macro")]
    assert all(r["tau"] == r["speedup"] == 1 for r in last["rows"] if r["policy"] == "plain")


def test_bench_errors(small, call, monkeypatch, tmp_path):
    for options, words in ((["--repeats", "0"], "--repeats"), (["--max-new-tokens", "1"], "--max-new-tokens"),
                           (["--gamma", "4"], "1 to 3"), (["--gamma", "0"], "1 to 3"), (["--drafter", "none"], "nothing to compare"),
                           (["--prompts", "nowhere"], "cannot read")):
        code, out, err = run_bench(call, monkeypatch, *small[:2], *options)
        assert code == 2 and not out and err.count("\n") == 1 and err.startswith("bench.py: ") and words in err


def test_ctrl_c_ends_the_benchmark(small, call, monkeypatch):
    calls = []

    def cancelled(*args, **kw):
        calls.append(1)
        return [Result(ids=[1], finish="cancelled")]

    monkeypatch.setattr(dspark, "generate", cancelled)
    assert run_bench(call, monkeypatch, *small[:2])[0] == 130 and len(calls) == 1
