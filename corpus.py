"""Training data: dialogues that the target writes itself, and what the target's layers say about them (Sec. 3.3, 5.1).

    python train.py generate     dialogues into data/*.npz, each with a .features file beside it
    python train.py fit          makes the .features files that are missing (other feature layers, data from elsewhere), then trains

Shard    numpy arrays: ids uint16, or uint32 for a large vocabulary (all dialogues end to end), starts int64 (n + 1), answer int32
         (index within the dialogue of the first answer token), temperature float32 (at which the answer was drawn).
Features per token, in bf16: hidden states of the drafter's feature layers (m * D) and the last normed hidden state (D); in
         float32 the log of the softmax's normaliser. With these, p_target of any token at any position costs one dot product,
         not a pass through the model: Sec. 5.1's "send hidden states, apply the head at sampled positions only".
Held out every 50th dialogue, by its place in its shard: never trained on, used for the reported tau and for calibration.
Letters  S slots, L tokens of a dialogue, D width, m feature layers.
"""
import json
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import checkpoints
import ranks
import smollm2
from verify import logits_to_probs, sample

PROMPTS = Path(__file__).parent / "prompts.jsonl"  # what bench.py decodes
HELD_OUT = 50  # every 50th dialogue of a shard

# The model writes its questions itself, after its own user header. Openings steer it towards the domains that people use
# speculative decoding for; an empty opening lets it ask what it likes.
OPENINGS = {
    "math": ["A store sells", "If a train travels", "What is the sum of", "Solve for x", "How many", "Calculate the", "Tom has",
             "Sarah bought", "A rectangle has", "What is the probability", "Find the", "A farmer", "Explain how to solve",
             "What is the value of", "There are", "Convert", "John earns", "The price of a", "What percent of", "Simplify"],
    "code": ["Write a Python function", "Write a function that", "How do I", "Implement a", "Write a Python program to",
             "Explain what this code does:", "Write a SQL query", "Create a class", "Fix the bug in", "Write a script that",
             "Write a JavaScript function", "How can I sort", "Write code to", "What does the", "Given a list of",
             "Write a program that reads", "Define a Python class", "In Python, how do you", "Write a recursive function",
             "Write a unit test for"],
    "chat": ["", "", "", "", "Why", "What is", "How does", "Can you", "Tell me about", "Write a short story", "Give me tips",
             "Explain", "What are the benefits of", "Describe", "Who was", "Write an email", "Summarize", "I am planning",
             "What should I", "Compare", "Write a poem", "List", "How can I", "Please help me", "What is the difference between",
             "Suggest", "Recommend", "I have a"],
}
# Answers at the temperatures that people decode with, half of them greedy or nearly.
TEMPERATURES, SHARES = (0.0, 0.3, 0.7, 1.0), (0.35, 0.15, 0.2, 0.3)
QUESTION_TEMPERATURE = 0.8  # at 1 a small model's questions fall apart


@dataclass
class Writer:
    """One dialogue being written."""

    ids: list[int]       # so far
    forced: list[int]    # tokens to come that are given, not drawn: an opening, the assistant's header
    temperature: float   # of its answer
    row: int             # of the wave's buffers
    slot: int = 0        # of the wave's cache, which shrinks
    answer: int = 0      # index of the first answer token; 0: still asking


@torch.inference_mode()
def write_dialogues(target, encoding, n, slots, max_question, max_answer, seed, layers):
    """Let the target write n dialogues; yields each when it is finished, with its features: (writer, (features, last, normaliser)).

    In waves of up to `slots`, one token a step: all of a wave stand at the same position, so attention pads nothing, and when
    a quarter has ended the rest moves together. The states that training needs are at hand here and cost nothing but the
    keeping. The system prompt is the same for all: run once and copied, so there is no prefill. The last token was never fed
    to the target: its rows are zero, and training looks at none of them.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    ends = target.config.eos
    empty = smollm2.chat(encoding, "")  # system turn, user header | <|im_end|> \n, assistant header
    if not set(ends) & set(empty):
        raise ValueError(f"the chat template ends the user's turn with none of the ids that end an answer ({ends}): use an instruct model")
    cut = max(i for i, token in enumerate(empty) if token in ends)
    prefix, header = empty[:cut], empty[cut:]
    slots, longest = min(slots, n), len(prefix) + max_question + len(header) + max_answer
    if longest > target.config.max_len:
        raise ValueError(f"dialogues of up to {longest} tokens exceed the context of {target.config.max_len}: lower --max-answer")
    P = len(prefix) - 1  # the last prefix token is the first that every slot feeds itself
    shared, D, m = target.new_cache(1, P), target.config.d_model, len(layers)
    last, features = target.hidden(torch.tensor(prefix[:P]), torch.zeros(P, dtype=torch.long), torch.arange(P), shared, layers)
    kept = [torch.zeros(slots, longest, m * D, dtype=target.dtype), torch.zeros(slots, longest, D, dtype=target.dtype),
            torch.zeros(slots, longest)]
    for buffer, prompt in zip(kept, (features, last, target.head(last).float().logsumexp(-1))):
        buffer[:, :P] = prompt  # for good: later writes all lie behind it

    def start(row):
        openings = OPENINGS[("math", "code", "chat")[rng.integers(3)]]
        # domain first, then opening: a domain with more openings is not asked more often
        opening = smollm2.encode(encoding, openings[rng.integers(len(openings))])[: max_question - 1]
        return Writer(list(prefix), opening, float(rng.choice(TEMPERATURES, p=SHARES)), row)

    for first in range(0, n, slots):
        live, old, take, place = [start(row) for row in range(min(slots, n - first))], shared, None, P
        while live:
            if take is None or len(live) <= 0.75 * len(take):
                # a new cache for those that live: their slots of the old one (at first, all copies of the shared prompt)
                take = torch.tensor([w.slot for w in live] if old is not shared else [0] * len(live))
                cache = target.new_cache(len(live), longest)
                for new, now in zip(cache.k + cache.v, old.k + old.v):
                    new[:, :place] = now[take, :place]
                old = cache
                for slot, w in enumerate(live):
                    w.slot = slot
            at = torch.tensor([w.slot for w in live])
            last, features = target.hidden(torch.tensor([w.ids[-1] for w in live]), at, torch.full_like(at, place), cache, layers)
            logits = target.head(last).float()
            for buffer, value in zip(kept, (features, last, logits.logsumexp(-1))):
                buffer[[w.row for w in live], place] = value
            place += 1
            temperature = torch.tensor([w.temperature if w.answer else QUESTION_TEMPERATURE for w in live])
            u = torch.rand(len(live), generator=generator, dtype=torch.float64)
            for w, token in zip(live[:], sample(logits_to_probs(logits, temperature), u).tolist()):
                # what was drawn in a forced place is thrown away: cheaper than a second kind of step
                given = bool(w.forced)
                token = w.forced.pop(0) if given else token
                w.ids.append(token)
                if given:
                    continue
                ended = token in ends
                if not w.answer:
                    if ended or len(w.ids) - len(prefix) >= max_question:  # the question is asked
                        if ended:
                            w.ids[-1] = header[0]  # of several ends, the template's own
                        w.forced = header[ended:]
                        w.answer = len(w.ids) + len(w.forced)
                elif ended or len(w.ids) - w.answer >= max_answer:
                    live.remove(w)
                    states = [buffer[w.row, : len(w.ids)].clone() for buffer in kept]
                    for state in states:
                        state[-1] = 0  # a former wave's
                    yield w, states


def generate(args):
    """Write args.sequences dialogues in shards of args.shard; finished shards are skipped, so a second run resumes.

    Under torchrun rank r of n writes shards r, r + n, ..: by number, not by what is missing, which others change meanwhile."""
    rank, world = ranks.rank_and_world()
    target, encoding = checkpoints.load_target(args.target, dtype=torch.bfloat16)
    most = target.config.n_layers - 2
    if args.feature_layers != sorted(set(args.feature_layers) & set(range(most + 1))):
        raise ValueError(f"--feature-layers {args.feature_layers}: rising, in 0..{most}, never the last (the default is SmolLM2's)")
    args.data.mkdir(parents=True, exist_ok=True)
    paths = [args.data / f"shard-{args.seed}-{i:04d}.npz" for i in range(-(-args.sequences // args.shard))]
    settings = f"{args.shard} {args.max_question} {args.max_answer}"
    for path in paths:
        if path.exists() and (found := str(load_shard(path).get("settings", settings))) != settings:
            raise smollm2.SetupError(f"{path} was written with other settings ({found}, not {settings}): use another --seed or --data")
    todo = [(i, path) for i, path in enumerate(paths) if i % world == rank and not path.exists()]
    begin, tokens, done = time.time(), 0, 0
    for i, path in todo:
        # a seed per shard: it holds the same dialogues whether or not those before it were written in the same run, and by whom
        dialogues, states = [], []
        for w, kept in write_dialogues(target, encoding, args.shard, args.slots, args.max_question, args.max_answer,
                                       args.seed * 10000 + i, args.feature_layers):
            dialogues.append(w)
            states.append(kept)
            done, tokens = done + 1, tokens + len(w.ids) - w.answer
            seconds = time.time() - begin
            left = seconds / done * (len(todo) * args.shard - done) / 60
            print(f"\r{path.name}: {len(dialogues)}/{args.shard} dialogues; {tokens} answer tokens, {tokens / seconds:.0f}/s, "
                  f"{left:.0f} min left ", end="", file=sys.stderr, flush=True)
        arrays = dict(
            ids=np.array([t for w in dialogues for t in w.ids], np.uint16 if target.config.vocab_size <= 2**16 else np.uint32),
            starts=np.cumsum([0] + [len(w.ids) for w in dialogues]),
            answer=np.array([w.answer for w in dialogues], np.int32),
            temperature=np.array([w.temperature for w in dialogues], np.float32),
        )
        # features first: without its shard a features file is never looked at
        save_features(path, made_from(args.feature_layers, to_dialogues(path, arrays)), *(torch.cat(part) for part in zip(*states)))
        unfinished = path.with_suffix(".part")
        with open(unfinished, "wb") as f:
            np.savez_compressed(f, settings=settings, **arrays)
        unfinished.rename(path)  # whole or not at all
    ranks.barrier()
    print(f"\n{len(paths)} shards in {args.data}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Reading, and features


@dataclass
class Dialogue:
    ids: torch.Tensor   # (L,) int64
    answer: int         # index of the first answer token
    temperature: float  # at which the answer was drawn
    shard: Path
    start: int          # of the dialogue in its shard


def load_shard(path: Path) -> dict:
    """The arrays of a shard, or SetupError."""
    try:
        with np.load(path) as shard:
            arrays = dict(shard)
        arrays["ids"], arrays["starts"], arrays["answer"], arrays["temperature"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise smollm2.SetupError(f"{path} is no shard of dialogues ({type(error).__name__}): delete it, or name another folder")
    return arrays


def to_dialogues(path, arrays) -> list[Dialogue]:
    """The dialogues of a shard's arrays, in order."""
    ids, starts = torch.from_numpy(arrays["ids"].astype(np.int64)), arrays["starts"].tolist()
    return [Dialogue(ids[a:b], answer, temperature, path, a)
            for a, b, answer, temperature in zip(starts, starts[1:], arrays["answer"].tolist(), arrays["temperature"].tolist())]


def read(folder: Path) -> tuple[list[Dialogue], list[Dialogue]]:
    """All shards of a folder -> (training dialogues, held-out dialogues)."""
    training, held_out = [], []
    for path in sorted(folder.glob("*.npz")):
        for i, d in enumerate(to_dialogues(path, load_shard(path))):
            (training if i % HELD_OUT else held_out).append(d)
    if not training:
        raise smollm2.SetupError(f"no data in {folder}: run 'python train.py generate' first")
    return training, held_out


def read_prompts(path) -> list[tuple[str, str]]:
    """JSONL of {"prompt": str} or {"turns": [str, ..]} (first turn), optional "domain" -> [(domain, prompt)]."""
    prompts = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also split at U+2028, within a string
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}")
    for number, line in enumerate(lines, 1):
        if not line.strip():  # a blank line, most often the last
            continue
        try:
            item = json.loads(line)
            turns = [item["prompt"]] if "prompt" in item else item["turns"]
            text = turns[0] if isinstance(turns, list) else None  # a string has a first letter, not a first turn
            if not (isinstance(text, str) and text.strip()):
                raise ValueError("empty")
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f'{path}, line {number}: not an object with a non-empty "prompt" or "turns"')
        domain = str(item.get("domain", item.get("category", "all"))).encode("utf-8", "replace").decode()
        if domain == "macro":
            raise ValueError(f'{path}, line {number}: a domain cannot be called "macro", the name of the mean over domains')
        prompts.append((domain, text))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def without(dialogues, prompts, run=13):
    """The dialogues that share no run of 13 tokens with an evaluation prompt (ids; a shorter prompt counts whole).

    The target writes its questions itself, so it may ask one that is in the benchmark; a drafter must not have seen it."""
    known = {}  # length -> all runs of that length
    for ids in prompts:
        n = min(run, len(ids))
        known.setdefault(n, set()).update(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))

    def clean(d):
        ids = d.ids.tolist()
        return not any(tuple(ids[i : i + n]) in runs for n, runs in known.items() for i in range(len(ids) - n + 1))

    return [d for d in dialogues if clean(d)]


def fingerprint(prompts) -> str:
    """A short name for a list of (domain, prompt): a drafter's record says which prompts it has not seen."""
    return f"{len(prompts)} prompts, crc {zlib.crc32(repr(sorted(text for _, text in prompts)).encode()):08x}"


@torch.inference_mode()
def extract(target, dialogues, layers):
    """Run dialogues through the target -> per dialogue (features (L, m * D), last (L, D), normaliser (L,))."""
    lengths = [len(d.ids) for d in dialogues]
    slots = torch.repeat_interleave(torch.arange(len(dialogues)), torch.tensor(lengths))
    places = torch.cat([torch.arange(n) for n in lengths])
    cache = target.new_cache(len(dialogues), max(lengths))
    last, features = target.hidden(torch.cat([d.ids for d in dialogues]), slots, places, cache, layers)
    normaliser = torch.cat([target.head(part).float().logsumexp(-1) for part in last.split(256)])
    return list(zip(features.split(lengths), last.split(lengths), normaliser.split(lengths)))


def made_from(layers, dialogues) -> str:
    """What a features file was made from: these layers, exactly these dialogues (a shard may be written anew, or used in part)."""
    crc = 0
    for d in sorted(dialogues, key=lambda d: d.start):
        crc = zlib.crc32(d.ids.numpy().tobytes(), crc)
    return repr((tuple(layers), crc))


def save_features(shard, made, features, last, normaliser):
    """features (n, m * D), last (n, D), normaliser (n,) of a shard's n tokens, into the file beside it."""
    unfinished = shard.with_suffix(".features.part")
    save_file(dict(features=features.bfloat16(), last=last.bfloat16(), normaliser=normaliser), unfinished, dict(made_from=made))
    unfinished.rename(shard.with_suffix(".features"))  # whole or not at all


class Features:
    """The features of all dialogues, read from files beside their shards; made here where they are missing.

    On disk, so that they are computed once however often training is started; mapped, so that memory holds what it can.
    Under torchrun each rank makes what is missing of its share of the shards.
    """

    def __init__(self, target, layers, dialogues, batch_tokens=3000):
        self.files, by_shard, (rank, world) = {}, {}, ranks.rank_and_world()
        for d in dialogues:
            by_shard.setdefault(d.shard, []).append(d)
        made = {shard: made_from(layers, part) for shard, part in by_shard.items()}
        missing = {shard for shard in sorted(made)[rank::world] if not self.open(shard, made[shard])}
        todo, done, begin = sum(len(d.ids) for d in dialogues if d.shard in missing), 0, time.time()
        for path in sorted(missing):
            mine = sorted(by_shard[path], key=lambda d: len(d.ids))  # alike lengths: little padding
            n, D = max(d.start + len(d.ids) for d in mine), target.config.d_model
            features = torch.empty(n, len(layers) * D, dtype=torch.bfloat16)
            last, normaliser = torch.empty(n, D, dtype=torch.bfloat16), torch.empty(n)
            while mine:
                part = mine[-max(1, batch_tokens // len(mine[-1].ids)) :]
                mine = mine[: -len(part)]
                for d, (f, l, z) in zip(part, extract(target, part, layers)):
                    at = slice(d.start, d.start + len(d.ids))
                    features[at], last[at], normaliser[at] = f, l, z
                    done += len(d.ids)
                left = (time.time() - begin) / done * (todo - done) / 60
                print(f"\rfeatures: {done}/{todo} tokens, {left:.0f} min left ", end="", file=sys.stderr, flush=True)
            save_features(path, made[path], features, last, normaliser)
        if missing:
            print(file=sys.stderr)
        ranks.barrier()  # all are made
        assert all(self.open(shard, made[shard]) for shard in made), "do all processes see the same folder?"

    def open(self, shard, made) -> bool:
        """Map the shard's features if they exist and were made from the same."""
        try:
            f = safe_open(shard.with_suffix(".features"), framework="pt")
        except (FileNotFoundError, SafetensorError):
            return False
        if (f.metadata() or {}).get("made_from") != made:
            return False
        self.files[shard] = [f.get_slice(name) for name in ("features", "last", "normaliser")]
        return True

    def get(self, dialogue):
        """-> features (L, m * D), last (L, D), normaliser (L,)"""
        return [s[dialogue.start : dialogue.start + len(dialogue.ids)] for s in self.files[dialogue.shard]]
