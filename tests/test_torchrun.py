"""
Tests of training as several processes (ranks.py): two on the CPU, over gloo. Run: python -m pytest tests/test_torchrun.py

torchrun is started twice, on this very file: once for everything that succeeds or fails on both ranks alike, one scenario after the
other (starting Python three times costs more than all the training), and once for an error of one rank, which ends both.
"""
import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import corpus
import drafter as drafting
import ranks
import smollm2
import train
from target import tiny_target
from test_train import SMALL, V, dialogue, make, write_shards

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch has no gloo")
UPDATES = 8
FIT = (*SMALL, "--updates", UPDATES, "--eval-every", 4)
GENERATE = ("generate", "--sequences", 25, "--shard", 5, "--slots", 3, "--max-question", 8, "--max-answer", 9, "--feature-layers", 0, 1)


def fake(m):
    """The tiny target in place of the real one, a tokenizer of bytes, and a checkpoint after every update."""
    m.setattr(smollm2, "load", lambda path=None, dtype=torch.float32, **kw: (tiny_target(tied=False).to(dtype), None))
    m.setattr(smollm2, "encode", lambda encoding, text: list(text.encode()))
    clock = iter(range(0, 10**9, 1000))
    m.setattr(train, "time", SimpleNamespace(time=lambda: next(clock)))


def fit(m, folder, name, *options, double=True):
    """train.py fit. double: in float64, which autocast leaves alone, so that two processes can be held to what one computes."""
    fake(m)
    prepare = train.prepare

    def in_double(args):
        drafter, features, training, held_out, facts = prepare(args)
        # one held-out dialogue: enough to evaluate, too few for the refit at the end, which is for float32
        return drafter.double(), SimpleNamespace(get=lambda d: [x.double() for x in features.get(d)]), training, held_out[:1], facts

    if double:
        m.setattr(train, "prepare", in_double)
    command(m, "--data", folder / "data", "--out", folder / "out", *FIT, "--name", name, *options)


def generate(m, folder):
    fake(m)
    m.setattr(smollm2, "EOS", 2)
    m.setattr(smollm2, "encode", lambda encoding, text: [11, 12])
    m.setattr(smollm2, "chat", lambda encoding, text: [1, 5, 2, 9, 1, 7, 2, 9, 1, 8])
    command(m, "--data", folder, *GENERATE)


def command(m, *args):
    m.setattr(sys, "argv", ["train.py", *map(str, args)])
    train.main()


def after(m, n, what):
    """losses() is called n times; from then on what(its result) is returned."""
    calls, whole = [], train.losses

    def counted(*args):
        calls.append(1)
        return whole(*args) if len(calls) <= n else what(whole(*args))

    m.setattr(train, "losses", counted)


def stop(_):
    raise KeyboardInterrupt


def full(_):
    raise OSError("no space left")


def nan(result):
    return result[0] * float("nan"), *result[1:]


# ---------------------------------------------------------------------------------------------------------------------
# what torchrun runs: python -m torch.distributed.run tests/test_torchrun.py FOLDER


def gradients_of_a_batch():
    """In float64 but for DraftLoss, every head: two ranks' gradients against those of losses() over the whole batch.
    -> {case: largest difference in the first step, in a later one, and without ranks.share; relative to the largest gradient}"""
    rank, world = ranks.rank_and_world()
    # answers of 34, 3, 33 and 1 tokens: rank 1 has the second and the fourth, a few labels; or none, in the second batch
    long, none, half, few = dialogue(40, 6, seed=1), dialogue(11, 10, seed=2), dialogue(38, 5, seed=3), dialogue(9, 6, seed=4)
    found = {}
    for head in drafting.KINDS:
        target, drafter = make(head)
        for through, part in ((False, [long, few, half, none]), (True, [long, few, half, none]), (True, [long, none, half, none])):
            features = corpus.extract(target, part, (0, 1))

            def gradient(model, mine):
                drafter.zero_grad()
                batch = train.make_batch(part, features[mine], 4, 3, np.random.default_rng(0), mine)
                model(batch, (0.3, 0.1, 0.6), 4.0, through)[0].backward()
                return torch.cat([p.grad.flatten().clone() for p in drafter.parameters() if p.grad is not None])

            one = gradient(lambda *args: train.losses(drafter, *args), slice(None))
            # only now: DDP takes whatever runs backward after it was made for a part of its own first step
            model = ranks.parallel(train.ShareOfLoss(drafter))
            two = gradient(model, slice(rank, None, world))
            with pytest.MonkeyPatch.context() as m:
                m.setattr(ranks, "share", lambda weight: 1.0)
                broken = gradient(model, slice(rank, None, world))
            again = gradient(model, slice(rank, None, world))  # DDP's first step, which learns the graph, is not like the others
            found[f"{head} {through} {part[1] is none}"] = [((g - one).abs().max() / one.abs().max()).item() for g in (two, again, broken)]
    return found


def gradients(m, folder):
    ranks.run(lambda: (folder / f"gradients.{os.environ['RANK']}.json").write_text(json.dumps(gradients_of_a_batch())), together=True)


def broken(m, folder):
    m.setattr(ranks, "share", lambda weight: 1.0)
    fit(m, folder, "broken")


def interrupted(m, folder):
    after(m, 3, stop)
    fit(m, folder, "two-one")


def one_nan(m, folder):
    if os.environ["RANK"] == "1":
        after(m, 2, nan)
    fit(m, folder, "one_nan")


def refit(m, folder):
    fake(m)
    command(m, "--data", folder / "data", "--out", folder / "out", "refit", "--name", "bf16-two")


def missing(m, folder):
    command(m, "--data", folder / "missing", *FIT)


SCENARIOS = dict(gradients=gradients, generate=lambda m, folder: generate(m, folder / "by two"), two=lambda m, folder: fit(m, folder, "two"),
                 broken=broken, interrupted=interrupted, resumed=lambda m, folder: fit(m, folder, "one-two"),
                 bf16=lambda m, folder: fit(m, folder, "bf16-two", double=False), refit=refit, missing=missing, one_nan=one_nan,
                 small_batch=lambda m, folder: fit(m, folder, "small", "--batch", 1))


def worker(folder, names):
    """Scenarios in turn, each a run of its own as far as the process group can tell. Rank r leaves NAME.r.out, NAME.r.err (what it
    said) and NAME.r (exit code, and the files that it wrote)."""
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    for name in names:
        written, code = [], 0

        def note(module, function, at):
            whole = getattr(module, function)
            m.setattr(module, function, lambda *args, **kw: written.append(Path(args[at]).name) or whole(*args, **kw))

        with (pytest.MonkeyPatch.context() as m, open(folder / f"{name}.{rank}.out", "w") as out,
              open(folder / f"{name}.{rank}.err", "w") as err, redirect_stdout(out), redirect_stderr(err)):
            # torchrun gives every start a store of its own; here all use one, under other names
            store = dist.TCPStore
            for module in (dist, sys.modules["torch.distributed.rendezvous"]):
                m.setattr(module, "TCPStore", lambda *args, **kw: dist.PrefixStore(name, store(*args, **kw)))
            for module, function, at in ((torch, "save", 1), (drafting, "save", 1), (train, "write_record", 0), (corpus, "save_features", 0)):
                note(module, function, at)
            try:
                SCENARIOS[name](m, folder)
            except SystemExit as error:
                code = error.code
            (folder / f"{name}.{rank}").write_text(json.dumps(dict(code=code, written=written, left=dist.is_initialized())))
        while not (folder / f"{name}.{1 - int(rank)}").exists():  # a rank that goes on alone would pull the group from under the other
            time.sleep(0.01)
        if dist.is_initialized():  # after an error, where a process would have ended
            dist.destroy_process_group()


def failing(folder):
    """Rank 1 alone fails, in the midst of training, while rank 0 waits for its gradients."""
    with pytest.MonkeyPatch.context() as m:
        if os.environ["RANK"] == "1":
            after(m, 2, full)
        fit(m, folder, "failing")


def torchrun(*args):
    root = Path(__file__).parent.parent
    env = os.environ | dict(PYTHONPATH=f"{root}", OMP_NUM_THREADS="1")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, *map(str, args)]
    return subprocess.run(run, env=env, cwd=root, capture_output=True, text=True, timeout=600)  # (a minute on a busy machine)


# ---------------------------------------------------------------------------------------------------------------------
# what pytest looks at


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One process and two, over the same data: answers of 3 or 35 tokens, so that ranks' weights differ; 61 dialogues, 59 to train on."""
    folder, rng, said = tmp_path_factory.mktemp("torchrun"), np.random.default_rng(0), StringIO()
    texts = [(rng.integers(V, size=rng.choice([8, 40])), 5, float(i % 2)) for i in range(61)]
    write_shards(folder / "data", [31, 30], dialogues=texts)

    def alone(run, *args, **kw):
        with pytest.MonkeyPatch.context() as m, redirect_stdout(said):
            run(m, *args, **kw)

    start = {}
    with pytest.MonkeyPatch.context() as m:
        from_target = drafting.from_target
        m.setattr(drafting, "from_target", lambda *args: start.update(drafter=from_target(*args)) or deepcopy(start["drafter"]))
        alone(fit, folder, "one")
    torch.save(dict(drafter=start["drafter"].state_dict()), folder / "data" / "start.ckpt")
    with pytest.MonkeyPatch.context() as m, pytest.raises(SystemExit, match="the same command resumes"):
        after(m, 3, stop)
        alone(fit, folder, "one-two")
    alone(fit, folder, "bf16-one", double=False)
    alone(generate, folder / "by one")
    for path in (folder / "data").glob("*.features"):
        path.rename(f"{path}.of_one")  # two ranks make them again
    done = torchrun(folder, *SCENARIOS)
    assert done.returncode == 0, done.stderr
    alone(fit, folder, "two-one")
    (folder / "alone.out").write_text(said.getvalue())
    return folder


def distance(folder, a, b, names=""):
    """How far the weights of two runs (whose names begin so) are from each other, relative to how far the first has come."""
    start, a, b = (torch.load(folder / "data" / f"{run}.ckpt")["drafter"] for run in ("start", a, b))
    start, a, b = (torch.cat([state[n].double().flatten() for n in start if n.startswith(names)]) for state in (start, a, b))
    return ((a - b).norm() / (a - start).norm()).item()


def ends(folder, name):
    """Of both ranks: (exit codes, files written, both's stdout, all lines on stderr but for progress)."""
    found = [json.loads((folder / f"{name}.{rank}").read_text()) for rank in (0, 1)]
    out, err = ([(folder / f"{name}.{rank}.{x}").read_text() for rank in (0, 1)] for x in ("out", "err"))
    lines = [line for text in err for line in text.replace("\r", "\n").split("\n") if line and not line.startswith("features:")]
    return [f["code"] for f in found], [f["written"] for f in found], out, lines


def test_gradients_of_two_ranks_are_those_of_one(folder):
    """Every head, with and without a gradient from the confidence loss, ranks with unequal labels and with none at all. All in float64
    but DraftLoss, whose float32 leaves 2^-24 times some dozen terms. Without the scaling by weight, which a quick reading would take
    for DDP's own, the gradient is another."""
    for rank in (0, 1):
        found = json.loads((folder / f"gradients.{rank}.json").read_text())
        assert len(found) == 3 * len(drafting.KINDS)
        for case, (first, later, without_share) in found.items():
            assert max(first, later) < 1e-5 and without_share > 0.1, case


def test_two_processes_train_what_one_does(folder):
    """8 updates, real optimizers, float64. Gradients agree to 1e-7 (above), so AdamW's weights to a few times that, but for elements with
    next to no gradient: 1e-3 in all. Muon orthogonalises in bf16 whatever it is given: once one element has rounded to its other
    neighbour, all that follows may, each by 2^-8 of itself in the matrix that is applied. Hence 2^-7 of the distance trained, for
    all weights together. Without the scaling by weight they end elsewhere."""
    assert distance(folder, "one", "two") < 2**-7 and distance(folder, "one", "two", "head.W2") < 1e-3
    assert distance(folder, "one", "broken") > 0.1 and distance(folder, "one", "broken", "head.W2") > 0.1


def test_two_processes_in_bf16_differ_by_its_rounding(folder):
    """As train.py runs: products in bf16. The float64 run says how far its rounding takes one process from the exact weights, e; two
    processes round other sums, their own halves of each, and are as far from them. Independent errors of that size differ by
    sqrt(2) e; these are less than independent."""
    e = distance(folder, "one", "bf16-one")
    assert 0 < distance(folder, "bf16-one", "bf16-two") < 2**0.5 * e < distance(folder, "one", "broken")


def test_a_checkpoint_goes_on_with_another_number_of_processes(folder):
    assert max(distance(folder, "one", "one-two"), distance(folder, "one", "two-one")) < 2**-7
    assert "one-two.ckpt at update 3" in ends(folder, "resumed")[2][0] and "two-one.ckpt at update 3" in (folder / "alone.out").read_text()
    assert sorted(map(str, ends(folder, "interrupted")[0])) == ["\nstopped; the same command resumes", "1"]  # whoever was first says it


def test_rank_0_alone_writes_and_prints(folder):
    expected = dict(two=["two.ckpt.part"] * UPDATES + ["two.safetensors", "two.json"], refit=["bf16-two.safetensors", "bf16-two.json"])
    for name, files in expected.items():
        codes, written, out, lines = ends(folder, name)
        assert codes == [0, 0] and [w for w in written[0] if "shard" not in w] == files and "held" in out[0]
        assert not [w for w in written[1] if "shard" not in w] and not out[1] and not lines
        assert not any(json.loads((folder / f"{name}.{rank}").read_text())["left"] for rank in (0, 1))  # the group has ended
    one, two = (json.loads((folder / "out" / f"bf16-{n}.json").read_text()) for n in ("one", "two"))
    assert [h["update"] for h in one["history"]] == [h["update"] for h in two["history"]] == [4, 8, 8]
    assert one["trained_positions"] == two["trained_positions"]


def test_features_are_made_by_both_ranks(folder):
    """The first fit finds none, and each rank makes those of one shard: the bytes that one process makes."""
    written = ends(folder, "two")[1]
    assert [[w for w in part if "shard" in w] for part in written] == [["shard-0-0000.npz"], ["shard-0-0001.npz"]]
    for path in (folder / "data").glob("*.of_one"):
        assert path.read_bytes() == path.with_suffix("").read_bytes()


def test_dialogues_are_written_in_shares(folder):
    """No shard by both, and together the very shards that one process writes: their seeds are their own."""
    codes, written, _, _ = ends(folder, "generate")
    names = [f"shard-0-{i:04d}" for i in range(5)]
    assert codes == [0, 0] and written == [[f"{n}.npz" for n in names[::2]], [f"{n}.npz" for n in names[1::2]]]
    assert sorted(f.name for f in (folder / "by two").iterdir()) == sorted(n + e for n in names for e in (".features", ".npz"))
    texts = set()
    for name in names:
        one, two = (dict(np.load(folder / by / f"{name}.npz")) for by in ("by one", "by two"))
        assert one.keys() == two.keys() and all(np.array_equal(one[k], two[k]) for k in one)
        assert (folder / "by one" / f"{name}.features").read_bytes() == (folder / "by two" / f"{name}.features").read_bytes()
        texts.add(one["ids"].tobytes())
    assert len(texts) == 5


@pytest.mark.parametrize("name, message", [("missing", "no data in .*missing"), ("one_nan", "the loss is nan at update 2"),
                                           ("small_batch", "--batch 1: .*2 processes")])
def test_what_stops_both_is_said_once(folder, name, message):
    """one_nan: the loss of rank 1's dialogues alone is no number, and both see it."""
    codes, _, _, lines = ends(folder, name)
    assert codes == [2, 2] and len(lines) == 1 and re.match(f"train.py: .*{message}", lines[0]), lines


def test_an_error_of_one_rank_ends_all_with_one_line(tmp_path):
    """What rank 0 meets then, a closed connection, is no news. (torchrun adds a report of its own.)"""
    write_shards(tmp_path / "data", [60])
    done = torchrun(tmp_path, "failing")
    lines = [line for line in done.stderr.split("\n") if "train.py:" in line or "Connection closed" in line]
    assert done.returncode != 0 and lines == ["train.py: no space left"], done.stderr
    assert [f.name for f in (tmp_path / "data").glob("*.ckpt*")] == ["failing.ckpt"]  # the last good state


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    failing(Path(folder)) if names == ["failing"] else worker(Path(folder), names)
