"""critkl: reinforcement learning of a small language model on critical tokens, in one file.

    python critkl.py --mode critical      pretrain (cached), then PPO with the critical KL penalty
    python critkl.py --mode standard      the same with the standard penalty; --mode none: without
    python critkl.py --mode dppo          the ratio clip replaced by a mask on the divergence
    python critkl.py --mode evaluate      tables of the pretrained model, or of --checkpoint FOLDER
    python critkl.py --help               every setting; also --mode inspect and --mode bench

Two papers, cited below by letter and equation:
  [V] Vassoyan et al., Ignore the KL Penalty! Boosting Exploration on Critical Tokens to Enhance
      RL Fine-Tuning, arXiv 2502.06533. Its "prioritized" penalty is called critical here.
  [Q] Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.

A language model that adds on a scratchpad is pretrained on numbers of up to N digits, and on longer
ones with planted mistakes (D2), then trained by RL on N+1. B episodes, T positions, V tokens; mu is
the rollout policy, pi the policy being trained, ref the frozen pretrained one. Position t holds the
state ids[:, :t+1] and the action ids[:, t+1], so all (B, T) tensors of a batch with T+1 tokens line
up; where L is used, L = T+1. What is called before it is defined stands further down, mostly below
the ruler after `train`; my_share, gather_rows and average_gradients act only in several processes.

Departures from the papers (D) and from their authors' code (C); the README explains each.
  D1  Model: a position's input is the embedding of its token and half of that of the token before;
      rotary positions on half of the channels; layer norm without parameters; no biases but the
      value head's.
  D2  Planted mistakes: a share `dial` of the pretraining problems is longer, drawn like those of
      RL. There each list of two digits or more, in lines 1 to 3, that is longer than operands of N
      digits make it is closed one digit early with probability `mistakes`. The model of [V] makes
      this mistake by itself at N = 7; one that is trained in minutes makes it always or never. See
      `close_early`.
  D3  Pretraining: Muon for the hidden matrices, AdamW for the rest.
  D4  PPO with whitened advantages and a falling learning rate; other defaults than [V] tables 2, 3.
      One epoch of one minibatch is A2C, which [V] uses, but for whitening and the falling rate.
  D5  GAE with lambda = 1 (released: 0.95): the only reward comes at the end, some 280 tokens late.
  D6  Training and test problems are split by a hash of the two numbers, so they never overlap.
  D7  Log-ratios are cut to [-20, 20] before exp. This bounds a token's weight; its gradient stays.
  D8  The value loss trains the value head alone, so it does not move the policy.
  D9  [V] table 1 is taken on the true answers; of the other tokens it gives the mean (paper: the
      minimum).
  D10 [Q]: GAE and whitening unless --advantage group; the mean over a minibatch's tokens (Eq. 12
      sums).
  D11 The KL penalty is estimated from mu's samples without weights, also where pi has left mu.
  C1  [V] certainty is the text's negentropy. Released: max_prob at temperature 4.
  C2  [V] temperature 1. Released: RL divides logits by 2, --temperature 2.
  C3  [V] the KL term is added to the loss. The released PPO class subtracts it (the paper
      ran A2C).
  C4  [Q] nothing is added inside logarithms (released: 1e-8); no cap on the ratio (released: 10;
      --ratio-cap); the sampled token joins the top K (released: it replaces the K-th).
"""
import argparse
import contextlib
import copy
import functools
import hashlib
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import sys
import time
import zipfile
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    # Ctrl-C while torch loads
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch
import torch.nn as nn
import torch.nn.functional as F

VERSION = "2.3"


class UserError(ValueError):
    """A mistake of the user's: printed as one line, exit code 2."""


# ---- Settings. Every field of Config is a flag, and --help is made from it; a preset, a mode and a
# method set several at once.

PRESETS = {
    "laptop": dict(),
    "laptop7": dict(digits=7, dial=0.0, pretrain_steps=12000, window=8),
    # GPT-2 small (85M without embeddings); from iterations to the end [V] tables 2 and 3, A2C
    "paper": dict(
        digits=7, dial=0.0, layers=12, width=768, heads=12, pretrain_steps=20000,
        pretrain_batch=64, pretrain_lr=2e-3, iterations=1000, episodes=50, epochs=1, minibatch=50,
        lr=1e-6, entropy_coef=5e-4, value_coef=0.1, alpha=5.0, method="pg_is"),
}
MODE_SETTINGS = {
    "pretrain": dict(penalty="none", iterations=0),
    "none": dict(penalty="none"),
    "standard": dict(penalty="standard"),
    "critical": dict(penalty="critical"),
    "dppo": dict(penalty="none", method="dppo"),
}
# what [Q] compares by Eq. 23: the mask and its bounds, the cap C, the anchor of the ratio
METHODS = {
    "ppo": dict(trust_region="clip"),
    "pg_is": dict(trust_region="none"),
    "cispo": dict(trust_region="none", ratio_cap=3.0),
    "grpo_clip_higher": dict(trust_region="clip", eps_high=0.28),
    "minirl": dict(trust_region="clip", eps_high=0.28, anchor="recomputed"),
    "minirl_tis": dict(trust_region="clip", eps_high=0.28, anchor="recomputed", ratio_cap=3.0),
    "dppo": dict(trust_region="divergence"),
    "negative_only": dict(trust_region="negative", delta=0.5),
}
TRAINING_MODES = tuple(MODE_SETTINGS)
RL_MODES = TRAINING_MODES[1:]
MODES = (*TRAINING_MODES, "evaluate", "inspect", "bench")
PENALTIES = ("none", "standard", "critical")
TRUST_REGIONS = ("clip", "divergence", "negative", "none")
DIVERGENCES = ("binary_tv", "binary_kl", "topk_tv", "topk_kl", "tv", "kl")


def option(default, text, low=None, high=None, choices=None, needs=None):
    """A field of Config: its help text, and what it allows.

    Numbers: low to high. Text: one of the choices. `needs` = (other field, values): the setting
    has an effect only where the other field has one of these values.
    """
    return field(default=default, metadata=dict(
        help=text, low=low, high=high, choices=choices, needs=needs))


NEEDS_RL = ("mode", (*RL_MODES, "bench"))
NEEDS_PENALTY = ("penalty", ("standard", "critical"))
NEEDS_CRITICAL = ("penalty", ("critical",))
NEEDS_CLIP = ("trust_region", ("clip",))


@dataclass
class Config:
    mode: str = option("critical", "what to do", choices=MODES)
    preset: str = option("laptop", "a set of defaults", choices=tuple(PRESETS))
    # task and pretraining
    digits: int = option(3, "N: pretraining covers 1 to N digits, and a share --dial beyond", 1, 30)
    extra: int = option(1, "k: RL problems have an operand of N+k digits", 1, 3)
    dial: float = option(0.6, "share of pretraining problems drawn like those of RL", 0, 1)
    mistakes: float = option(0.2, "in these, probability to close a long list early", 0, 1)
    layers: int = option(2, "transformer blocks", 1, 96)
    width: int = option(64, "width of the residual stream", 4, 16384)
    heads: int = option(2, "attention heads", 1, 128)
    window: int = option(0, "the first block sees this many tokens and it alone has positions "
                            "(0: all blocks see all)", 0, 100_000)
    pretrain_steps: int = option(1400, "optimizer steps of pretraining", 1, 10**9)
    pretrain_batch: int = option(16, "problems per pretraining step", 1, 4096)
    pretrain_lr: float = option(0.01, "its learning rate (19 steps up, then linearly to 0)", 0, 1)
    pretrain_weight_decay: float = option(0.1, "weight decay of the hidden matrices", 0, 1)
    # RL
    iterations: int = option(20, "RL iterations: one batch of rollouts each", 0, 10**9,
                             needs=("mode", RL_MODES))
    episodes: int = option(64, "rollouts per iteration", 1, 4096, needs=NEEDS_RL)
    epochs: int = option(2, "passes over each batch of rollouts", 1, 100, needs=NEEDS_RL)
    minibatch: int = option(16, "episodes per optimizer step", 1, 4096, needs=NEEDS_RL)
    lr: float = option(3e-4, "learning rate of RL (falls linearly to 0)", 0, 1,
                      needs=("mode", RL_MODES))
    gamma: float = option(1.0, "discount", 0, 1, needs=("advantage", ("gae",)))
    lam: float = option(1.0, "lambda of GAE", 0, 1, needs=("advantage", ("gae",)))
    value_coef: float = option(1.0, "coefficient of the value loss", 0, 1e6,
                               needs=("advantage", ("gae",)))
    entropy_coef: float = option(0.0, "coefficient of the entropy bonus", 0, 1e6, needs=NEEDS_RL)
    max_grad_norm: float = option(1.0, "gradient clipping (0: none)", 0, 1e9, needs=NEEDS_RL)
    temperature: float = option(1.0, "RL's policies are softmax(logits / temperature)", 0.01,
                                100)
    # KL penalty, [V] section 4
    penalty: str = option("critical", "KL penalty (set by --mode)", choices=PENALTIES)
    alpha: float = option(2.0, "coefficient of the KL penalty", 0, 1e6, needs=NEEDS_PENALTY)
    beta: float = option(150.0, "exponent of the certainty", 0, 1e9, needs=NEEDS_CRITICAL)
    kl_kind: str = option("k2", "KL estimator", choices=("k1", "k2", "k3", "exact"),
                          needs=NEEDS_PENALTY)
    certainty: str = option("negentropy", "certainty of the reference",
                            choices=("negentropy", "max_prob"), needs=NEEDS_CRITICAL)
    certainty_temperature: float = option(0.0, "temperature it is computed at (0: the policies')",
                                          0, 100, needs=NEEDS_CRITICAL)
    # trust region, [Q] section 4
    method: str = option("ppo", "sets trust region, bounds, cap and anchor", choices=tuple(METHODS))
    trust_region: str = option("clip", "trust region", choices=TRUST_REGIONS)
    eps_low: float = option(0.2, "clip: ratios below 1 - eps_low", 0, 1, needs=NEEDS_CLIP)
    eps_high: float = option(0.2, "clip: ratios above 1 + eps_high", 0, 1e6, needs=NEEDS_CLIP)
    divergence: str = option("binary_tv", "divergence of the mask", choices=DIVERGENCES,
                             needs=("trust_region", ("divergence",)))
    delta: float = option(0.15, "threshold of the mask ([Q]: 0.15 for TV, 0.05 for KL)", 0, 1e6,
                          needs=("trust_region", ("divergence", "negative")))
    top_k: int = option(20, "K of the top-K divergences", 1, 1_000_000,
                        needs=("divergence", ("topk_tv", "topk_kl")))
    ratio_cap: float = option(0.0, "C: cap of the importance weight (0: none)", 0, 1e6,
                              needs=NEEDS_RL)
    anchor: str = option("rollout", "compare pi with mu, or with itself before the update",
                         choices=("rollout", "recomputed"),
                         needs=("trust_region", ("clip", "divergence", "negative")))
    relax: str = option("none", "ends of the clip lifted for unlikely tokens",
                        choices=("none", "high", "low", "both"), needs=NEEDS_CLIP)
    relax_below: float = option(0.1, "which tokens these are: mu below this", 0, 1,
                                needs=("relax", ("high", "low", "both")))
    advantage: str = option("gae", "by the value head, or reward less the mean of its group",
                            choices=("gae", "group"), needs=NEEDS_RL)
    group: int = option(8, "answers per problem with group advantages", 2, 4096,
                        needs=("advantage", ("group",)))
    sampler_dtype: str = option("float32", "weights of the sampler",
                                choices=("float32", "bfloat16"), needs=("mode", RL_MODES))
    staleness: int = option(1, "iterations for which the sampler keeps its weights", 1, 10**6,
                            needs=("mode", RL_MODES))
    fixed: int = option(0, "RL on this many fixed problems, which the pretrained model solves "
                           "sometimes (0: new ones)",
                        0, 10_000, needs=("mode", RL_MODES))
    # running
    seed: int = option(0, "seed of everything random", 0, 2**31)
    device: str = option("auto", "where to run: auto, cpu, cuda, cuda:1, mps")
    threads: int = option(1, "CPU threads (0: as the machine has)", 0, 1024)
    out: str = option("runs", "folder that holds all runs")
    name: str = option("", "name of the run folder (default: made from the settings)")
    eval_every: int = option(5, "iterations between two evaluations", 1, 10**6,
                             needs=("mode", RL_MODES))
    eval_problems: int = option(100, "problems per evaluation set while training", 1, 10_000,
                                needs=("mode", TRAINING_MODES))
    test_problems: int = option(1000, "problems per evaluation set at the end", 1, 100_000)
    problem: str = option("", "the problem, for example 2033+5179", needs=("mode", ("inspect",)))
    checkpoint: str = option("", "a run folder whose policy is used",
                             needs=("mode", ("evaluate", "inspect")))
    json: bool = option(False, "print JSON", needs=("mode", ("bench",)))

    def __post_init__(self):
        check(self)


FREE_FIELDS = ("out", "name", "json", "preset")                      # change nothing in what is run
PRETRAINING_FIELDS = (                                               # decide the pretrained model
    "digits", "extra", "dial", "mistakes", "layers", "width", "heads", "window", "pretrain_steps",
    "pretrain_batch", "pretrain_lr", "pretrain_weight_decay", "seed", "device", "threads")
# in these a policy and --checkpoint must agree
POLICY_FIELDS = sorted({*PRETRAINING_FIELDS, "temperature"} - {"device", "threads"})

def flag(name, value):
    """A setting as the command line has it: "--eps-low 0.2"."""
    return f"--{name.replace('_', '-')} {value}"

def check(cfg):
    """Raises UserError where a setting is not allowed, by itself or beside the others."""
    def require(right, name, allowed):
        if not right:
            raise UserError(f"{flag(name, getattr(cfg, name))}: allowed is {allowed}")

    for f in fields(Config):
        value, low, high = getattr(cfg, f.name), f.metadata["low"], f.metadata["high"]
        choices = f.metadata["choices"]
        types = (int, float) if f.type is float else (f.type,)
        require(type(value) in types, f.name, f"a value of type {f.type.__name__}")
        require(not choices or value in choices, f.name, f"one of {', '.join(choices or ())}")
        require(low is None or low <= value <= high, f.name, f"{low} to {high}")    # nan is not
    of_episodes = f"a divisor of --episodes {cfg.episodes}"
    require(cfg.width % (4 * cfg.heads) == 0, "width", f"a multiple of 4 * --heads {cfg.heads}")
    require(cfg.episodes % cfg.minibatch == 0, "minibatch", of_episodes)
    require(cfg.advantage == "gae" or cfg.episodes % cfg.group == 0, "group", of_episodes)
    require(re.fullmatch(r"([\w+=-][\w.+=-]{0,99})?", cfg.name), "name",
            "up to 100 letters, digits and _ + = - ., no . first")
    require(cfg.mode != "pretrain" or cfg.iterations == 0, "iterations", "0 with --mode pretrain")
    require(cfg.mode not in PENALTIES or cfg.penalty == cfg.mode, "penalty",
            f"{cfg.mode} with --mode {cfg.mode}")
    require(re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]+)?", cfg.device), "device",
            "auto, cpu, cuda, cuda:1 (or another number), mps")
    number = "(0|[1-9][0-9]{0,29})"
    require(cfg.mode != "inspect" or re.fullmatch(rf"{number}\+{number}", cfg.problem), "problem",
            "two numbers of at most 30 digits without leading zeros, like 2033+5179")


def stream(*key):
    """A generator of its own for each (seed, purpose, iteration): no random state is saved."""
    return random.Random("/".join(map(str, key)))


# ---- Tokens: one character, one token. PAD fills the right end of a batch.

PAD = "_"
VOCABULARY = PAD + "\n +,-/0123456789:<=>ACDEINT[]aceghnprstu"     # V = 41 characters
TOKEN_ID = {character: i for i, character in enumerate(VOCABULARY)}
NEWLINE = TOKEN_ID["\n"]
SLASH = TOKEN_ID["/"]

def encode(text):
    """Text to a list of token ids. Raises UserError on a character outside the vocabulary."""
    for character in text:
        if character not in TOKEN_ID:
            raise UserError(f"unknown character {character!r}; known are {VOCABULARY[1:]!r}")
    return [TOKEN_ID[character] for character in text]

def decode(ids):
    """Token ids (list or 1-D tensor) to text."""
    return "".join(VOCABULARY[i] for i in torch.as_tensor(ids).tolist())

# ---- Environment, [V] section 3.1. State: text. Action: a character. Reward: 1 for a right result.

def prompt(a, b):
    """The text the model is given: "Input:\\n128+367\\nTarget:"."""
    return f"Input:\n{a}+{b}\nTarget:"

def scratchpad(a, b, mistake=None):
    """The response it should give, from the newline after the prompt to that after the result.

    For 128+367 (a last carry would lead the result, not A; END has no comma before its C):
        <scratch>
        [1,2,8] + [3,6,7] , A=[] , C=0 , 8+7+0=15 , A->5 , C->1
        [1,2] + [3,6] , A=[5] , C=1 , 2+6+1=9 , A->9 , C->0
        [1] + [3] , A=[9,5] , C=0 , 1+3+0=4 , A->4 , C->0
        [] + [] , A=[4,9,5] C=0 , END
        </scratch>
        4 9 5
    mistake(digits, line) gives what a line lists in place of its digits; the rest goes on from it.
    """
    x, y = str(a), str(b)                                            # the digits still to add
    result, carry, lines = "", 0, []
    while x or y:
        if mistake is not None:
            x, y = mistake(x, len(lines) + 1), mistake(y, len(lines) + 1)
        i, j = int(x[-1:] or 0), int(y[-1:] or 0)
        total = i + j + carry
        lines.append(
            f"{bracketed(x)} + {bracketed(y)} , A={bracketed(result)} , C={carry} , "
            f"{i}+{j}+{carry}={total} , A->{total % 10} , C->{total // 10}")
        x, y = x[:-1], y[:-1]
        result, carry = f"{total % 10}{result}", total // 10
    lines.append(f"[] + [] , A={bracketed(result)} C={carry} , END")
    answer = f"{carry}{result}" if carry else result
    return "\n<scratch>\n" + "\n".join(lines) + "\n</scratch>\n" + " ".join(answer) + "\n"

def bracketed(digits):
    """The list of some digits as a scratchpad writes it: "128" is "[1,2,8]"."""
    return "[" + ",".join(digits) + "]"

def close_early(digits, line, cfg, rng):
    """The planted mistake (D2): what a pretraining scratchpad lists in place of `digits`.

    Operands of N digits leave at most N + 1 - line digits to line 1, 2, ... A longer list in lines
    1 to 3 loses its last digit with probability cfg.mistakes. For N = 3, in line 1:
        close_early("2033", 1, ...)    "203" or "2033": its list [2,0,3,3] is longer than N
        close_early("203", 1, ...)     "203"
    and in line 2 "203" may become "20", but "20" stays. A list of one digit has no comma to lose.
    """
    known = max(cfg.digits + 1 - line, 1)
    if line <= 3 and len(digits) > known and rng.random() < cfg.mistakes:
        return digits[:-1]
    return digits

def is_correct(a, b, response):
    """The reward: is the line after "</scratch>" the spaced digits of a+b?"""
    result = response.partition("</scratch>\n")[2]
    answer, newline, _ = result.partition("\n")
    return newline == "\n" and answer == " ".join(str(a + b))

def held_out(a, b):
    """One problem in ten is kept for tests, with its mirror b+a: never trained on (D6)."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0

def draw(rng, n, m, test=False):
    """A problem of the training or test part; its operands have n and m digits, in any order."""
    lengths = rng.sample((n, m), 2)
    while True:
        a, b = [rng.randrange(10 ** (n - 1) if n > 1 else 0, 10 ** n) for n in lengths]
        if held_out(a, b) == test:
            return a, b

def rl_problem(rng, cfg):
    """One operand has N+k digits, the other half of the time 1 to N, else N+1 to N+k ([V] code)."""
    longest = cfg.digits + cfg.extra
    low, high = (1, cfg.digits) if rng.random() < 0.5 else (cfg.digits + 1, longest)
    return draw(rng, longest, rng.randint(low, high))

def pretraining_example(rng, cfg):
    """(prompt, response) texts. The longer operand has 1 to N digits, balanced; a share `dial` are
    problems of RL, with planted mistakes (D2)."""
    if rng.random() < cfg.dial:
        a, b = rl_problem(rng, cfg)
    else:
        n = rng.randint(1, cfg.digits)
        a, b = draw(rng, n, rng.randint(1, n))
    mistake = functools.partial(close_early, cfg=cfg, rng=rng)
    return prompt(a, b), scratchpad(a, b, mistake)

def collate(prompts, responses, device="cpu"):
    """Lists of token lists to a batch, padded on the right.

    Returns ids (B, L) and mask (B, L-1) bool: True at t where ids[:, t+1] is a response token.
    """
    rows = [torch.tensor(p + r) for p, r in zip(prompts, responses)]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=TOKEN_ID[PAD])
    begin = torch.tensor([len(p) for p in prompts])
    end = torch.tensor([len(row) for row in rows])
    return ids.to(device), response_mask(begin, end, ids.shape[1]).to(device)

def response_mask(begin, end, L):
    """(B, L-1) bool: True at t where position t+1 lies in [begin, end), (B,) each."""
    position = torch.arange(1, L, device=begin.device)
    return (position >= begin[:, None]) & (position < end[:, None])

# ---- Model: a small pre-norm transformer with tied embeddings, rotary positions and a value head.

def norm(x):
    """Layer norm without parameters."""
    return F.layer_norm(x, x.shape[-1:])

def rotate(x, cos, sin):
    """Rotary positions: x (B, T, heads, C), its halves as pairs of coordinates, turned."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).to(x.dtype)

class Block(nn.Module):
    """Attention and MLP. `local`: GPT's mask hides all but the last tokens. `rotary`: positions."""

    def __init__(self, width, heads, local=False, rotary=True):
        super().__init__()
        self.heads, self.local, self.rotary = heads, local, rotary
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x, cos, sin, mask=None, cache=None, positions=None):
        """x (B, T, width) to the same. Without a mask attention is causal. A cache (2, B, L, heads,
        C) takes the keys and values of these positions (B, T); with a mask (B, 1, T, S) the T
        queries attend to the cache's first S positions."""
        B, T, width = x.shape
        qkv = self.qkv(norm(x)).view(B, T, 3, self.heads, width // self.heads)
        q, k, v = qkv.unbind(2)                                      # (B, T, heads, C) each
        if self.rotary:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            rows = torch.arange(B, device=x.device)[:, None]
            cache[0][rows, positions] = k.to(cache.dtype)
            cache[1][rows, positions] = v.to(cache.dtype)
            if mask is not None:
                k, v = cache[:, :, :mask.shape[-1]].to(q.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, width))
        return x + self.down(F.gelu(self.up(norm(x))))

class GPT(nn.Module):
    """ids (B, T) to logits (B, T, V), float32 and divided by the temperature, and values (B, T).

    With a window the first block sees that many tokens, and it alone has positions (D1). The value
    head reads the features without a gradient (D8).
    """

    def __init__(self, layers, width, heads, window=0):
        super().__init__()
        self.temperature = 1.0
        self.window = window
        self.embedding = nn.Embedding(len(VOCABULARY), width)
        self.blocks = nn.ModuleList()
        for i in range(layers):
            local = window > 0 and i == 0
            self.blocks.append(Block(width, heads, local, rotary=local or window == 0))
        self.value_head = nn.Linear(width, 1)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def device(self):
        return self.embedding.weight.device

    def new_cache(self, B, length):
        """Keys and values of B rows, zeros (layers, 2, B, length, heads, C)."""
        heads = self.blocks[0].heads
        width = self.embedding.embedding_dim
        dtype = torch.bfloat16 if self.device.type == "cuda" else self.embedding.weight.dtype
        shape = (len(self.blocks), 2, B, length, heads, width // heads)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def forward(self, ids, cache=None, start=None, before=None):
        """Without `start` each row begins at position 0. With `start` (B,), row i goes on at
        position start[i] and sees what `cache` holds before it; `before` (B, T) are then the ids
        one position earlier (D1). The cache is written in place. CUDA computes in bfloat16."""
        B, T = ids.shape
        if before is None:
            before = F.pad(ids, (1, 0), value=TOKEN_ID[PAD])[:, :T]
        positions = torch.arange(T, device=ids.device)[None]         # (1, T)
        seen, nearby = None, None                                    # masks: None is causal
        if start is not None:
            positions = start[:, None] + positions                   # (B, T)
        if start is not None or self.window:
            length = T if start is None else int(start.max()) + T
            key = torch.arange(length, device=ids.device)
            distance = positions[:, None, :, None] - key             # (B, 1, T, length)
            nearby = (distance >= 0) & (distance < self.window)
            seen = None if start is None else distance >= 0
        pairs = self.embedding.embedding_dim // self.blocks[0].heads // 2
        pair = torch.arange(pairs, device=ids.device)
        frequency = torch.where(pair < pairs // 2, 1e4 ** (-pair / pairs), 0)    # half do not turn
        angle = positions[..., None, None] * frequency               # (B, T, 1, pairs)
        cos, sin = angle.cos(), angle.sin()
        with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda):
            x = norm(self.embedding(ids) + self.embedding(before) / 2)
            for i, block in enumerate(self.blocks):
                mask = nearby if block.local else seen
                layer_cache = None if cache is None else cache[i]
                x = block(x, cos, sin, mask, layer_cache, positions)
            x = norm(x)
            logits = F.linear(x, self.embedding.weight)
            values = self.value_head(x.detach()).squeeze(-1)
        return logits.float() / self.temperature, values.float()

def token_logp(logits, actions):
    """log softmax(logits)[actions]: (..., V), (...) to (...), in float32."""
    return logits.float().log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)

# ---- Pretraining: supervised, from scratch, loss on response tokens only, [V] section 3.2.

def pretraining_batches(cfg, group):
    """Four batches of (prompt, response) texts, each of answers of like length: less padding."""
    rng = stream(cfg.seed, "pretrain", group)
    size = cfg.pretrain_batch
    examples = [pretraining_example(rng, cfg) for _ in range(4 * size)]
    examples.sort(key=lambda example: len(example[1]))
    batches = [examples[i:i + size] for i in range(0, 4 * size, size)]
    rng.shuffle(batches)
    return batches

def pretraining_step(model, optimizers, examples, lr):
    """One step on (prompt, response) texts; returns the loss. Raises UserError if not finite."""
    examples = my_share(examples)
    ids, mask = collate([encode(text) for text, _ in examples],
                        [encode(response) for _, response in examples], model.device)
    logits, _ = model(ids[:, :-1])
    loss = -masked_mean(token_logp(logits, ids[:, 1:]), mask)
    model.zero_grad()
    loss.backward()
    average_gradients(model, mask.sum())
    gradient = nn.utils.clip_grad_norm_(model.parameters(), math.inf)    # its norm, clips nothing
    info = require_finite(dict(loss=loss.detach(), gradient=gradient), "pretraining")
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return info["loss"]

def pretrain(cfg, log):
    """The pretrained model of `cfg` and the seconds it took. It is kept in a file; one that was
    stopped goes on. cfg.temperature is for RL: pretraining has 1."""
    torch.manual_seed(cfg.seed)
    model = new_model(cfg)
    optimizers = pretraining_optimizers(model, cfg)
    run = PretrainingRun(cfg, log, model, optimizers)
    batches = []
    for step in range(run.done, cfg.pretrain_steps):
        if not batches:
            batches = pretraining_batches(cfg, step // 4)[step % 4:]
        loss = pretraining_step(model, optimizers, batches.pop(0), pretraining_lr(step, cfg))
        run.step_done(loss)                                          # saves; stops if asked to
    model.temperature = cfg.temperature
    return model, run.seconds()

# ---- Sampling, one token at a time. The loop uses `generate_drafted`: the same tokens, sooner.

def gumbel(seed, *shape):
    """Gumbel noise: argmax(log p + noise) is a sample from p."""
    generator = torch.Generator().manual_seed(seed)
    return -torch.empty(shape).exponential_(generator=generator).log()

def newlines_after_slash(ids):
    """How many newlines stand after the first "/" up to each position, (B, L); 2 end a response."""
    in_tag = (ids == SLASH).cumsum(1) > 0
    return ((ids == NEWLINE) & in_tag).cumsum(1)

@torch.no_grad()
def generate(policy, prompts, limit, noise=None):
    """Sample one response for each prompt; greedy without noise.

    prompts: B token lists. limit: most response tokens. noise: (B, longest prompt + limit, V), on
    the policy's device. A response ends with the newline after its result (the second after "/") or
    at the limit. Returns ids (B, L) and mask (B, L-1) as `collate` does, and the policy's logits
    (B, L-1, V) and values (B, L-1) on them.
    """
    device = policy.device
    ids, _ = collate(prompts, [[TOKEN_ID[PAD]] * limit] * len(prompts), device)
    begin = torch.tensor([len(p) for p in prompts], device=device)   # first response position
    rows = torch.arange(len(prompts), device=device)
    cache = policy.new_cache(*ids.shape)
    logits, _ = policy(ids[:, :begin.max()], cache)
    logits = logits[rows, begin - 1]                                 # (B, V)
    length = begin.clone()
    for i in range(limit):
        going = newlines_after_slash(ids)[:, -1] < 2
        if not going.any():
            break
        scores = logits if noise is None else logits + noise[rows, begin + i]
        token = torch.where(going, scores.argmax(-1), TOKEN_ID[PAD])
        before = ids[rows, begin + i - 1]
        ids[rows, begin + i] = token
        length += going
        logits = policy(token[:, None], cache, begin + i, before[:, None])[0][:, 0]
    ids = ids[:, :length.max()]
    logits, values = policy(ids[:, :-1])
    return ids, response_mask(begin, length, ids.shape[1]), logits, values

# ---- Masked statistics: one mean for losses and diagnostics.

def masked_mean(x, mask):
    """Mean of x where mask is True (same shapes); 0 if it never is. No gradient elsewhere."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)

def whiten(x, mask):
    """x shifted and scaled to mean 0 and (population) variance 1 over the mask; 0 outside."""
    centered = torch.where(mask, x - masked_mean(x, mask), 0)
    return centered * (masked_mean(centered ** 2, mask) + 1e-8).rsqrt()

# ---- KL penalty, [V] section 4.

LOG_LIMIT = 20.0

def cut_log_ratio(logp, logp_other):
    """log(pi / other), cut to [-20, 20] before exp, with the gradient of log pi all the same (D7):
    this bounds a token's weight, but does not stop it."""
    cut = (logp - logp_other).detach().clamp(-LOG_LIMIT, LOG_LIMIT)
    return cut + (logp - logp.detach())                              # adds 0

def entropy(logits):
    """Entropy of the policy, (..., V) to (...), in nats."""
    logp = logits.float().log_softmax(-1)
    return -(logp.exp() * torch.where(logp > -math.inf, logp, 0)).sum(-1)

def certainty(logits, kind="negentropy"):
    """Certainty J of a policy, (..., V) to (...): 1 for one-hot, 0 for uniform.

    "negentropy": (Hmax - H) / Hmax with Hmax = log V, [V] Eq. 2. "max_prob": 1 + log(max p) /
    log V, the released code (C1). Raises UserError on another kind.
    """
    if kind == "negentropy":
        uncertainty = entropy(logits)
    elif kind == "max_prob":
        uncertainty = -logits.float().log_softmax(-1).amax(-1)
    else:
        raise UserError(f"certainty {kind}: allowed are negentropy, max_prob")
    return (1 - uncertainty / math.log(logits.shape[-1])).clamp(0, 1)

def kl_weight(J, beta):
    """The weight J^beta of the critical penalty, [V] Eq. 1; beta = 0 gives 1, the standard one."""
    return J ** beta

def kl_estimate(logp, logp_ref, kind):
    """Estimate of KL(pi || ref) from actions drawn from pi (here mu, D11), (B, T) to (B, T), nats.

    With r = pi / ref: k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r (1/r: D7). As a loss,
    k2 has in expectation the gradient of the KL, k1 has 0 and k3 that of KL(ref || pi).
    """
    log_ratio = logp - logp_ref
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio ** 2 / 2
    if kind == "k3":
        return torch.expm1(-cut_log_ratio(logp, logp_ref)) + log_ratio
    raise UserError(f"KL estimator {kind}: allowed are k1, k2, k3")

def kl_exact(logits, logits_ref):
    """KL(pi || ref) over the whole vocabulary, (..., V) to (...), in nats."""
    return kl_of_logp(logits.float().log_softmax(-1), logits_ref.float().log_softmax(-1))

def kl_of_logp(logp, logq):
    """KL(p || q) of log-probabilities, (..., V) to (...), at least 0. inf where q = 0 < p.

    Each token adds p log(p / q) + q - p, which sums to the same and is never negative. Where p and
    q are close it is computed as p (expm1(d) - d), d = log(q / p), in which nothing cancels.
    """
    p, q = logp.exp(), logq.exp()
    d = torch.where(p > 0, logq - logp, 0)
    small = torch.where(d.abs() < 1, d, 0)
    terms = torch.where(d.abs() < 1, p * (torch.expm1(small) - small), q - p - p * d)
    return torch.where(p > 0, terms, q).sum(-1)

# ---- Trust region, [Q] section 4.

@torch.no_grad()
def divergence(mu_logits, pi_logits, actions, kind, top_k=20):
    """Divergence D(mu || pi) of the next-token distributions, (..., V), (..., V), (...) to (...).

    "binary_tv", "binary_kl": over two events, the sampled token or not, [Q] Eq. 13, 14. "topk_tv",
    "topk_kl": over the top K of mu, the sampled token, and one bucket for the rest, Eq. 15, 16
    (K > V counts as V). "tv", "kl": over all of V. TV in [0, 1], KL in nats (inf: pi = 0 < mu).
    No gradient: it only makes a mask. Raises UserError on another kind.
    """
    if kind not in DIVERGENCES:
        raise UserError(f"divergence {kind}: allowed are {', '.join(DIVERGENCES)}")
    log_mu = mu_logits.float().log_softmax(-1)
    log_pi = pi_logits.float().log_softmax(-1)
    if kind not in ("tv", "kl"):
        named = torch.zeros_like(log_mu, dtype=torch.bool)           # the events of their own
        named.scatter_(-1, actions[..., None], True)
        if kind.startswith("topk"):
            K = min(top_k, log_mu.shape[-1])
            named.scatter_(-1, log_mu.topk(K).indices, True)
        log_mu = merge_rest(log_mu, named)
        log_pi = merge_rest(log_pi, named)
    if kind.endswith("kl"):
        return kl_of_logp(log_mu, log_pi)                            # sum mu log(mu / pi)
    return (log_mu.exp() - log_pi.exp()).abs().sum(-1) / 2

def merge_rest(logp, named):
    """Log-probabilities (..., V) to (..., V+1): the named tokens, and last all others as one event.
    The sum over the others keeps the precision that 1 - p would lose."""
    rest = torch.where(named, -math.inf, logp).logsumexp(-1, keepdim=True)
    return torch.cat((torch.where(named, logp, -math.inf), rest), dim=-1)

def trust_region_mask(ratio, advantages, D, delta):
    """M of [Q] Eq. 12, (B, T) bool, True = keep. A token is dropped where D > delta and its update
    would move it further away: (A > 0 and ratio > 1) or (A < 0 and ratio < 1)."""
    away = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    return ~(away & (D > delta))

# ---- Advantages and losses.

def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation: (B, T) each to (advantages, returns), (B, T), 0 outside the
    mask. Each row of the mask is one run of True, an episode. It ends with the run, also where the
    length limit cut it off: nothing is bootstrapped."""
    rewards = torch.where(mask, rewards, 0)
    values = torch.where(mask, values, 0)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    following = torch.zeros_like(values[:, 0])                       # the advantage at t+1
    for t in reversed(range(values.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(mask[:, t], error + gamma * lam * following, 0)
        advantages[:, t] = following
        next_value = values[:, t]
    return advantages, advantages + values

def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2, trust_region="clip",
                D=None, delta=0.15, ratio_cap=math.inf, logp_anchor=None):
    """Surrogate loss of PPO, DPPO and the methods that [Q] compares; returns (scalar, info).

    logp, logp_mu, advantages, mask: (B, T), log-probabilities of the actions under pi and mu.
    trust_region:
      "clip"        PPO, [Q] Eq. 10; eps_low and eps_high are numbers or (B, T)
      "divergence"  DPPO, Eq. 12; needs D (B, T), the divergence of pi from the anchor
      "negative"    section 5.3: drops tokens with A < 0 and mu - pi >= delta
      "none"        keeps all
    Beyond PPO and DPPO, Eq. 23: ratio_cap is C, and logp_anchor (B, T) the policy that pi is
    compared with in place of mu. The gradient is M min(pi / mu, C) A grad log pi.
    info: see `policy_diagnostics`. Raises UserError on another trust region.
    """
    logp_anchor = logp_mu if logp_anchor is None else logp_anchor
    logp = torch.where(mask, logp, 0)
    logp_mu = torch.where(mask, logp_mu, 0)
    logp_anchor = torch.where(mask, logp_anchor, 0)
    advantages = torch.where(mask, advantages, 0)
    ratio = cut_log_ratio(logp, logp_anchor).exp()
    if trust_region == "clip":
        clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
        objective = torch.min(ratio * advantages, clipped * advantages)
        keep = ratio * advantages <= clipped * advantages
    elif trust_region == "divergence":
        if D is None:
            raise UserError("trust region divergence: needs D, the divergence of each token")
        keep = trust_region_mask(ratio, advantages, D, delta)
        objective = keep * ratio * advantages
    elif trust_region == "negative":
        keep = (advantages >= 0) | (logp_anchor.exp() - logp.exp() < delta)
        objective = keep * ratio * advantages
    elif trust_region == "none":
        keep = torch.ones_like(mask)
        objective = ratio * advantages
    else:
        raise UserError(f"trust region {trust_region}: allowed are {', '.join(TRUST_REGIONS)}")
    # the objective holds pi / anchor, Eq. 23 wants the constant min(pi / mu, C); 1 for PPO and DPPO
    weight = cut_log_ratio(logp, logp_mu).exp().clamp(max=ratio_cap).detach() / ratio.detach()
    loss = -masked_mean(weight * objective, mask)
    return loss, policy_diagnostics(logp, logp_mu, advantages, mask, keep)

# ---- The loop: rollout, prepare, update.

@dataclass
class Rollout:
    """One batch of episodes under mu; no tensor here carries a gradient."""
    problems: list                    # B pairs (a, b)
    ids: torch.Tensor                 # (B, T+1) int64: prompt, response, PAD
    mask: torch.Tensor                # (B, T) bool: ids[:, t+1] is a response token
    logits: torch.Tensor              # (B, T, V) float32: mu's, as the sampler computed them
    values: torch.Tensor              # (B, T) float32: the sampler's
    correct: torch.Tensor             # (B,) float32: the reward at the end of each episode

@dataclass
class Batch:
    """What the loss needs of a rollout; no tensor here carries a gradient. None: not needed."""
    states: torch.Tensor              # (B, T) int64: ids[:, :-1]
    actions: torch.Tensor             # (B, T) int64: ids[:, 1:]
    mask: torch.Tensor                # (B, T) bool: the action is a response token
    logp_mu: torch.Tensor             # (B, T) float32: log mu(action | state)
    advantages: torch.Tensor          # (B, T) float32
    returns: torch.Tensor             # (B, T) float32
    logits_anchor: torch.Tensor       # (B, T, V) float32: what the mask compares pi with
    logits_ref: torch.Tensor = None   # (B, T, V) float32
    kl_weights: torch.Tensor = None   # (B, T) float32: J^beta, or 1

    def take(self, rows):
        """The Batch of some rows, without the padding that they all share."""
        rows = torch.tensor(rows, device=self.mask.device)
        T = int(self.mask[rows].any(0).nonzero().max()) + 1
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: x if x is None else x[rows, :T] for name, x in tensors.items()})

@torch.no_grad()
def score(model, ids):
    """Logits (B, T, V) of a model on ids (B, T+1), 16 rows at a time: they fit the CPU's cache."""
    pieces = my_share(ids).split(16)
    return gather_rows(torch.cat([model(piece[:, :-1])[0] for piece in pieces]))

def rollout(policy, problems, seed=None):
    """Answer each problem (greedy without a seed) and grade it. Drafts change the time alone."""
    prompts = [encode(prompt(a, b)) for a, b in problems]
    drafts = [encode(scratchpad(a, b)) for a, b in problems]
    limit = max(map(len, drafts)) + 16
    noise = None
    if seed is not None:
        longest = max(map(len, prompts))
        noise = my_share(gumbel(seed, len(problems), longest + limit, len(VOCABULARY)))
    parts = generate_drafted(policy, my_share(prompts), my_share(drafts), limit, noise)
    ids, mask, logits, values = [gather_rows(part) for part in parts]
    texts = [decode(row[1:][m]) for row, m in zip(ids.cpu(), mask.cpu())]
    correct = [float(is_correct(a, b, text)) for (a, b), text in zip(problems, texts)]
    return Rollout(problems, ids, mask, logits, values, torch.tensor(correct).to(policy.device))

def prepare(sampled, policy, reference, cfg):
    """The Batch of a Rollout: advantages, the anchor's logits (the policy's, before the update, if
    recomputed) for the mask, the reference's and J^beta for the penalty."""
    ids, mask = sampled.ids, sampled.mask
    last = mask & ~F.pad(mask[:, 1:], (0, 1))                        # the last action of an episode
    rewards = torch.where(last, sampled.correct[:, None], 0)
    advantages, returns = gae(rewards, sampled.values, mask, cfg.gamma, cfg.lam)
    if cfg.advantage == "gae":
        advantages = whiten(advantages, mask)
    else:                                                            # not divided by the spread
        grouped = sampled.correct.view(-1, cfg.group)
        advantages = (grouped - grouped.mean(1, keepdim=True)).view(-1, 1).expand_as(mask)
    batch = Batch(ids[:, :-1], ids[:, 1:], mask, token_logp(sampled.logits, ids[:, 1:]),
                  advantages, returns, logits_anchor=sampled.logits)
    if cfg.anchor == "recomputed":
        batch.logits_anchor = score(policy, ids)
    if cfg.penalty != "none":
        batch.logits_ref = score(reference, ids)
        beta = cfg.beta if cfg.penalty == "critical" else 0.0
        batch.kl_weights = kl_weight(reference_certainty(batch.logits_ref, cfg), beta)
    return batch

def ppo_loss(policy, batch, cfg):
    """L = L_RL + alpha L_KL + value and entropy terms of a Batch; returns (scalar, info)."""
    mask = batch.mask
    logits, values = policy(batch.states)
    logp = token_logp(logits, batch.actions)
    loss, info = policy_loss(logp, batch.logp_mu, batch.advantages, mask,
                             **trust_region_inputs(logits, batch, cfg))
    value_loss = masked_mean((values - batch.returns) ** 2, mask) / 2
    info |= dict(policy_loss=loss.detach(), value_loss=value_loss.detach())
    if cfg.advantage == "gae" and cfg.value_coef:
        loss = loss + cfg.value_coef * value_loss

    if cfg.penalty != "none":
        if cfg.kl_kind == "exact":
            kl = kl_exact(logits, batch.logits_ref)
        else:
            logp_ref = token_logp(batch.logits_ref, batch.actions)
            kl = kl_estimate(logp, logp_ref, cfg.kl_kind)
        penalty = masked_mean(batch.kl_weights * kl, mask)           # L_KL, [V] Eq. 1
        info |= dict(kl_ref=masked_mean(kl, mask).detach(), penalty=penalty.detach())
        if cfg.alpha:
            loss = loss + cfg.alpha * penalty

    with torch.set_grad_enabled(cfg.entropy_coef > 0):
        bonus = masked_mean(entropy(logits), mask)
    info["entropy"] = bonus.detach()
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * bonus
    return loss, info

def update(policy, optimizer, batch, cfg, iteration):
    """Some epochs of minibatches; returns the diagnostics of all of them, see `merge_infos`."""
    infos = []
    for epoch in range(cfg.epochs):
        order = list(range(cfg.episodes))
        stream(cfg.seed, "minibatches", iteration, epoch).shuffle(order)
        for i in range(0, cfg.episodes, cfg.minibatch):
            minibatch = batch.take(my_share(order[i:i + cfg.minibatch]))
            loss, info = ppo_loss(policy, minibatch, cfg)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(policy, minibatch.mask.sum())
            info["grad_norm"] = nn.utils.clip_grad_norm_(
                policy.parameters(), cfg.max_grad_norm or math.inf)
            info["tokens"] = minibatch.mask.sum()
            infos.append(require_finite(info, f"iteration {iteration}"))
            optimizer.step()
    return merge_infos(infos)

def train(cfg, log, folder):
    """Pretrain (or load), fine-tune, evaluate, save: one run, in its folder."""
    run = Run(cfg, log, folder)
    if run.is_complete():
        return
    reference, seconds = run.saved_reference() or pretrain(cfg, log)
    policy = copy.deepcopy(reference)
    reference.requires_grad_(False)
    sampler = copy.deepcopy(policy).to(getattr(torch, cfg.sampler_dtype))
    optimizer = torch.optim.AdamW(policy.parameters(), cfg.lr, betas=(0.9, 0.99), weight_decay=0)
    run.begin(seconds, reference=reference, policy=policy, sampler=sampler, optimizer=optimizer)
    fixed = fixed_problems(reference, cfg)
    for iteration in range(run.done, cfg.iterations):
        lr = cfg.lr * (1 - iteration / cfg.iterations)
        optimizer.param_groups[0]["lr"] = lr
        if iteration % cfg.staleness == 0:
            sampler.load_state_dict(policy.state_dict())
        problems = draw_problems(iteration, fixed, cfg)
        seed = stream(cfg.seed, "noise", iteration).getrandbits(63)
        sampled = rollout(sampler, problems, seed)
        batch = prepare(sampled, policy, reference, cfg)
        info = update(policy, optimizer, batch, cfg, iteration)
        info |= dict(reward=sampled.correct.mean().item(), lr=lr,
                     explained_variance=explained_variance(batch, sampled.values))
        run.iteration_done(sampled, info)                            # evaluates, saves, may stop
    run.end()

# ==================================================================================================
# What follows serves the above: diagnostics, a faster sampler, evaluation, files, command line.
# ==================================================================================================

# Diagnostics. Masked means are over response tokens, as in the losses.

@torch.no_grad()
def policy_diagnostics(logp, logp_mu, advantages, mask, keep):
    """How far pi is from mu, and what the trust region dropped: name to 0-dimensional tensor.

    Shares of all response tokens: masked (dropped); masked and A > 0, masked and A < 0; bad: A < 0
    and mu - pi >= 0.5, [Q] section 5.3; cut: the log-ratio is beyond D7's limit. Extremes of the
    ratio pi / mu; drift: pi - mu of the sampled token; kl_mu: the k3 estimate of KL(mu || pi).
    """
    drift = torch.where(mask, logp.exp() - logp_mu.exp(), 0)
    ratio = torch.where(mask, cut_log_ratio(logp, logp_mu).exp(), 1)

    def share(tokens):
        return masked_mean(tokens.float(), mask)

    return dict(
        masked=share(~keep),
        masked_positive=share(~keep & (advantages > 0)),
        masked_negative=share(~keep & (advantages < 0)),
        bad=share((advantages < 0) & (drift <= -0.5)),
        cut=share((logp - logp_mu).abs() > LOG_LIMIT),
        ratio_max=ratio.max(), ratio_min=ratio.min(),
        kl_mu=masked_mean(kl_estimate(logp_mu, logp, "k3"), mask),
        drift=masked_mean(drift, mask), drift_max=drift.max(), drift_min=drift.min())

def require_finite(info, what):
    """The dict of 0-dimensional tensors as numbers. Raises UserError where one is not finite."""
    numbers = torch.stack([x.float() for x in info.values()]).tolist()    # one transfer for all
    info = dict(zip(info, numbers))
    for name, number in info.items():
        if not math.isfinite(number):
            raise UserError(f"{what}: {name} is {number}; stopped before the step")
    return info

def merge_infos(infos):
    """One dict of the minibatches' diagnostics, of all processes: the largest of ..._max, the
    smallest of ..._min, of the others the mean over response tokens."""
    infos = [info for part in all_ranks(infos) for info in part]
    tokens = sum(info["tokens"] for info in infos)
    merged = {}
    for name in infos[0]:
        if name.endswith("_max"):
            merged[name] = max(info[name] for info in infos)
        elif name.endswith("_min"):
            merged[name] = min(info[name] for info in infos)
        elif name != "tokens":
            merged[name] = sum(info[name] * info["tokens"] for info in infos) / tokens
    return merged

def explained_variance(batch, values):
    """Share of the variance of the returns that the values (B, T) explain; 0 if there is none."""
    mean = masked_mean(batch.returns, batch.mask)
    total = masked_mean((batch.returns - mean) ** 2, batch.mask).item()
    left = masked_mean((batch.returns - values) ** 2, batch.mask).item()
    return 1 - left / total if total > 1e-8 else 0.0

def reference_certainty(logits_ref, cfg):
    """J as `cfg` asks for it, of logits that the model has divided by cfg.temperature."""
    temperature = cfg.certainty_temperature or cfg.temperature
    return certainty(logits_ref * (cfg.temperature / temperature), cfg.certainty)

def trust_region_inputs(logits, batch, cfg):
    """What `policy_loss` needs of the settings, with the clip relaxed for unlikely tokens ([Q]
    section 6) and the divergence of the mask."""
    unlikely = batch.logp_mu.exp() < cfg.relax_below
    relax_low = unlikely & (cfg.relax in ("low", "both"))
    relax_high = unlikely & (cfg.relax in ("high", "both"))
    inputs = dict(
        trust_region=cfg.trust_region, delta=cfg.delta, ratio_cap=cfg.ratio_cap or math.inf,
        eps_low=torch.where(relax_low, 1, cfg.eps_low),
        eps_high=torch.where(relax_high, math.inf, cfg.eps_high))
    if cfg.trust_region == "divergence":
        inputs["D"] = divergence(batch.logits_anchor, logits, batch.actions, cfg.divergence,
                                 cfg.top_k)
    if cfg.anchor == "recomputed":
        inputs["logp_anchor"] = token_logp(batch.logits_anchor, batch.actions)
    return inputs

# ---- The optimizer of pretraining.

class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalized, for matrices (D3); Jordan et al. 2024. That of
    torch.optim does it in bfloat16, in which most CPUs are slow."""

    def __init__(self, params, lr, weight_decay, momentum=0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                direction = orthogonalize(p.grad.lerp(mean, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)

def orthogonalize(matrix):
    """U V^T of a matrix U S V^T, roughly: five quintic Newton-Schulz steps toward S = 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x

def pretraining_optimizers(model, cfg):
    """Muon for the hidden matrices, AdamW for the embedding and the value head (D3)."""
    rest = [model.embedding.weight, *model.value_head.parameters()]
    return [Muon(model.blocks.parameters(), cfg.pretrain_lr, cfg.pretrain_weight_decay),
            torch.optim.AdamW(rest, cfg.pretrain_lr, betas=(0.9, 0.95), weight_decay=0.0)]

def pretraining_lr(step, cfg):
    """The learning rate: from 5% to all of it in 19 steps, then linearly to 0."""
    rising = 0.05 + step / 20
    falling = 1 - step / cfg.pretrain_steps
    return cfg.pretrain_lr * min(rising, falling)

# ---- Drafted sampling: the tokens of `generate`, two to four times as fast. The true scratchpad
# serves as a draft. One parallel pass scores all of it, each row keeps its own samples up to the
# first that differs from the draft, and goes on from there with a later part of the draft as the
# next guess. Every token kept is what `generate` draws from the same noise, but for rounding.

@torch.no_grad()
def generate_drafted(policy, prompts, drafts, limit, noise=None, chunk=24):
    """As `generate`. drafts: B token lists, the guessed responses; one that is empty or wrong costs
    time alone. chunk: tokens that are read in one pass, after the first pass over whole drafts."""
    B, V, device = len(prompts), len(VOCABULARY), policy.device
    draft, _ = collate(prompts, drafts, device)
    begin = torch.tensor([len(p) for p in prompts], device=device)   # (B,) first response position
    reading = draft.shape[1] - 1                                     # tokens that this pass reads
    size = max(int(begin.max()) + limit, draft.shape[1]) + chunk
    draft = F.pad(draft, (0, size - draft.shape[1]), value=TOKEN_ID[PAD])
    if noise is not None:                                            # not kept past the limit
        noise = F.pad(noise, (0, 0, 0, size - noise.shape[1])).to(device)
    column = torch.arange(size, device=device)
    ids = draft.clone()
    length = torch.zeros_like(begin)
    logits = torch.zeros(B, size, V, device=device)
    values = torch.zeros(B, size, device=device)
    cache = policy.new_cache(B, size)

    # Of the R rows that still write: text holds settled tokens and then the guess, `settled` is the
    # position of the last settled token, `shift` how far ahead of it the draft is read.
    rows = torch.arange(B, device=device)
    text = draft
    settled = torch.zeros_like(begin)
    shift = torch.zeros_like(begin)
    first_pass = True
    while len(rows):
        position = settled[:, None] + column[:reading]               # (R, reading)
        if first_pass:
            out, value = policy(text[:, :reading], cache)
        else:
            before = text.gather(1, position - 1)
            out, value = policy(text.gather(1, position), cache, settled, before)
        logits[rows[:, None], position] = out
        values[rows[:, None], position] = value
        if noise is not None:
            out = out + noise[rows[:, None], position + 1]
        guess = text.gather(1, position + 1)
        in_response = position + 1 >= begin[rows, None]
        token = torch.where(in_response, out.argmax(-1), guess)
        wrong = token != guess
        missed = wrong.any(1)
        kept = torch.where(missed, wrong.int().argmax(1), reading - 1)
        settled = settled + kept + 1
        text = text.scatter(1, settled[:, None], token.gather(1, kept[:, None]))
        shift = torch.where(missed, resume_shift(draft[rows], text, settled, shift), shift)
        ahead = (column + shift[:, None]).clamp(0, size - 1)
        text = torch.where(column > settled[:, None], draft[rows].gather(1, ahead), text)

        ended = newlines_after_slash(text) >= 2
        end = torch.where(ended[:, -1], ended.int().argmax(1), size)
        end = torch.minimum(end, begin[rows] + limit - 1)
        ids[rows] = text
        length[rows] = end + 1
        going = end > settled
        if not going.all():
            rows, text, cache = rows[going], text[going], cache[:, :, going]
            settled, shift = settled[going], shift[going]
        reading, first_pass = chunk, False
    L = int(length.max())
    ids = ids.masked_fill(column >= length[:, None], TOKEN_ID[PAD])
    return ids[:, :L], response_mask(begin, length, L), logits[:, :L - 1], values[:, :L - 1]

def resume_shift(draft, text, settled, shift, match=4):
    """How far ahead of the text the draft is read: (R, size), (R, size), (R,), (R,) to (R,).

    A row that has left the draft goes on after the nearest place in it that reads like the row's
    last `match` settled characters, all digits being alike. Draft: "[2,0,3,3] + [5,1,". Text:
    "[2,0,3]", a list that is closed early. Its end "0,3]" reads like the draft's "3,3]", two
    characters later, so the next guess is " + [5,1,". Without such a place the shift stays.
    """
    back = torch.arange(1 - match, 1, device=draft.device)
    recent = text.gather(1, (settled[:, None] + back).clamp(min=0))
    windows = digits_alike(draft).unfold(1, match, 1)                # (R, size - match + 1, match)
    alike = (windows == digits_alike(recent)[:, None]).all(-1)
    place = torch.arange(match - 1, draft.shape[1], device=draft.device)    # where a window ends
    distance = (place - (settled + shift)[:, None]).abs()
    nearest = torch.where(alike, distance, draft.shape[1]).argmin(1) + match - 1
    return torch.where(alike.any(1), nearest - settled, shift)

def digits_alike(ids):
    """ids with "0" for every digit: the shape of a text."""
    is_digit = (ids >= TOKEN_ID["0"]) & (ids <= TOKEN_ID["9"])
    return torch.where(is_digit, TOKEN_ID["0"], ids)

# ---- The problems of RL.

def draw_problems(iteration, fixed, cfg):
    """The problems of an iteration, each as often as its group has answers."""
    rng = stream(cfg.seed, "problems", iteration)
    answers = cfg.group if cfg.advantage == "group" else 1
    problems = []
    for _ in range(cfg.episodes // answers):
        problem = rng.choice(fixed) if fixed else rl_problem(rng, cfg)
        problems += [problem] * answers
    return problems

def fixed_problems(reference, cfg):
    """`cfg.fixed` problems that the pretrained model solves with probability 0.05 to 0.95, [Q] 5.1.
    Raises UserError where 10,000 tries do not give as many."""
    rng = stream(cfg.seed, "fixed")
    chosen = {}                                                      # each once, in their order
    tries = 0
    while len(chosen) < cfg.fixed:
        if tries == 10_000:
            raise UserError(f"--fixed {cfg.fixed}: of {tries:,} problems the pretrained model "
                            f"solves only {len(chosen)} sometimes")
        problems = [rl_problem(rng, cfg) for _ in range(100)]
        tries += 100
        expected, _ = examine(reference, problems, cfg.digits)
        for problem, p in zip(problems, expected.tolist()):
            if 0.05 <= p <= 0.95:
                chosen[problem] = p
    return list(chosen)[:cfg.fixed]

# ---- Evaluation. Under teacher forcing the product of the probabilities of all tokens is that of
# sampling the true scratchpad: exact, and a lower bound of graded success.

SETS = ("N", "N+1", "N+2", "N+3")                                    # digits of the longer operand

def test_set(n, count, seed, kind="varying"):
    """`count` held-out problems, [V] appendix A. One operand has n digits, the other 1 to n
    ("varying") or n ("identical")."""
    rng = stream(seed, "test", kind, n)
    problems = []
    for _ in range(count):
        m = n if kind == "identical" else rng.randint(1, n)
        problems.append(draw(rng, n, m, test=True))
    return problems

def true_batch(problems, device="cpu"):
    """ids (B, L) and mask (B, L-1) of the problems with their true scratchpads."""
    prompts = [encode(prompt(a, b)) for a, b in problems]
    responses = [encode(scratchpad(a, b)) for a, b in problems]
    return collate(prompts, responses, device)

def critical_tokens(a, b, digits):
    """Name to index in scratchpad(a, b) of each token that [V] appendix B lists as critical.

    In lines 1 to 3, of an operand with digits + g digits: the last 2g characters of its list, the
    commas and digits that operands of `digits` digits do not have. For 2033+5 and digits = 3, line
    1 is "[2,0,3,3] + [5] , ...": line1_first_n+1_comma and line1_first_n+1_digit are its ",3".
    """
    found = {}
    start = len("\n<scratch>\n")                                     # of the line
    for i, line in enumerate(scratchpad(a, b).split("\n")[2:5], 1):
        lists = re.finditer(r"\[([0-9,]*)\]", line)
        for operand, number, digit_list in zip(("first", "second"), (a, b), lists):
            excess = len(str(number)) - digits
            for k in range(1, excess + 1):
                pairs_left = excess - k + 1                          # commas and digits to the end
                comma = digit_list.end(1) - 2 * pairs_left
                if comma > digit_list.start(1):                      # else the list has no such
                    name = f"line{i}_{operand}_n+{k}"
                    found[f"{name}_comma"] = start + comma
                    found[f"{name}_digit"] = start + comma + 1
        start += len(line) + 1
    return found

def examine(model, problems, digits, log=None):
    """Teacher forcing on the true scratchpads: (n,) probabilities of sampling them, and a dict from
    the name of each critical token to the mean probability of the right character."""
    expected, critical = [], {}
    for i in range(0, len(problems), 200):                           # all at once takes gigabytes
        piece = problems[i:i + 200]
        ids, mask = true_batch(piece, model.device)
        logp = token_logp(score(model, ids), ids[:, 1:])
        logp = torch.where(mask, logp, 0).cpu()
        expected.append(logp.sum(1).exp())
        for row, (a, b) in zip(logp, piece):
            first = len(prompt(a, b)) - 1                            # scores the first character
            for name, index in critical_tokens(a, b, digits).items():
                critical.setdefault(name, []).append(row[first + index].exp().item())
        if log is not None:
            log.progress("evaluating", i + len(piece), len(problems))
    means = {name: sum(p) / len(p) for name, p in sorted(critical.items())}
    return torch.cat(expected), means

def force(policy, problems, places, wrong=True):
    """Decisive? [V] section 3.3: put a character into true answers and let the policy go on.

    places: pairs (number of the problem, index in its scratchpad). There the likeliest wrong
    character is put after the true text, or as a control (wrong=False) the true one; then the
    greedy answer goes on. Returns the characters and (n,) bool: does the answer come out right?
    """
    logits = score(policy, true_batch(problems, policy.device)[0])
    put, right = [], []
    for j in range(0, len(places), 100):                             # all at once takes gigabytes
        starts, drafts = [], []
        for i, index in places[j:j + 100]:
            begin, true = prompt(*problems[i]), scratchpad(*problems[i])
            character = true[index]
            if wrong:
                likeliest, second = decode(logits[i, len(begin) - 1 + index].topk(2).indices)
                character = likeliest if likeliest != character else second
            put.append(character)
            starts.append(encode(begin + true[:index] + character))
            drafts.append(encode(true[index + 1:]))
        ids, *_ = generate_drafted(policy, starts, drafts, limit=max(map(len, drafts)) + 16)
        for row, (i, _) in zip(ids, places[j:j + 100]):
            answer = decode(row).rstrip(PAD)[len(prompt(*problems[i])):]
            right.append(is_correct(*problems[i], answer))
    return put, torch.tensor(right, dtype=torch.bool)

def interval(values, resamples=1000):
    """(mean, low, high): mean of (n,) values and its 95% interval by resampling. Where all are 0,
    or all 1, resampling knows no spread: the interval is Wilson's (0 of 20: to 16.1%)."""
    n, mean = len(values), values.mean().item()
    if (values == values[0]).all() and mean in (0.0, 1.0):
        width = 1.96 ** 2 / (n + 1.96 ** 2)
        return (0.0, 0.0, width) if mean == 0 else (1.0, 1 - width, 1.0)
    generator = torch.Generator().manual_seed(0)
    means = [values[torch.randint(n, (n,), generator=generator)].mean() for _ in range(resamples)]
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975])).tolist()
    return mean, low, high

def test_accuracy(model, cfg, count, log=None):
    """Expected success on the varying sets of N and N+k, name to (mean, low, high), and the
    probabilities of the right critical tokens at N+k."""
    intervals = {}
    for k in (0, cfg.extra):
        problems = test_set(cfg.digits + k, count, cfg.seed)
        expected, critical = examine(model, problems, cfg.digits, log)
        intervals[SETS[k]] = interval(expected)
    return intervals, critical

# ---- Several processes, started by torchrun. Each takes every WORLD-th row of the same batch; rows
# are gathered where all need them, gradients averaged. With one process all this does nothing.

RANK, WORLD = 0, 1                                                   # set by `join_processes`

def my_share(rows):
    """The rows of a batch (list or tensor) that this process computes."""
    return rows[RANK::WORLD]

def all_ranks(value):
    """The list of every process's value, in rank order. Nobody goes on before all are here."""
    values = [value] * WORLD
    if WORLD > 1:
        torch.distributed.all_gather_object(values, value)
    return values

def gather_rows(mine):
    """The rows that `my_share` split, (n, L, ...) of each process, as one (B, longest L, ...)."""
    if WORLD == 1:
        return mine
    parts = all_ranks(mine.cpu())
    B = sum(map(len, parts))
    rows = [parts[i % WORLD][i // WORLD] for i in range(B)]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True).to(mine.device)

def average_gradients(model, tokens):
    """Put the mean of all processes' gradients, weighted by `tokens`, in place of each one's."""
    if WORLD == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    vector = nn.utils.parameters_to_vector(gradients) * tokens
    vector = torch.cat((vector, tokens.to(vector)[None]))            # one exchange for both
    torch.distributed.all_reduce(vector)
    nn.utils.vector_to_parameters(vector[:-1] / vector[-1], gradients)

def join_processes(cfg):
    """Set RANK and WORLD and join the others, if torchrun started this process. Raises UserError
    where the processes cannot share the work."""
    global RANK, WORLD
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    RANK = int(os.environ["RANK"]) if by_torchrun else 0
    WORLD = int(os.environ["WORLD_SIZE"]) if by_torchrun else 1
    if WORLD == 1:
        return
    if cfg.mode not in TRAINING_MODES or cfg.minibatch % WORLD or cfg.pretrain_batch % WORLD:
        raise UserError(f"{WORLD} processes: they must divide --minibatch {cfg.minibatch} and "
                        f"--pretrain-batch {cfg.pretrain_batch}, and can only train")
    torch.distributed.init_process_group("nccl" if cfg.device.startswith("cuda") else "gloo")

# ---- Files. Each is written beside its place and renamed, so that it is whole or absent.

def write(path, content):
    """Text, or a dict as a checkpoint (.pt) or as JSON, to a file, atomically; only rank 0 does.
    Raises UserError where the system refuses."""
    if RANK > 0:
        return
    beside = path.with_name(f".{path.name}.{os.urandom(6).hex()}.critkl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "xb") as file:
            if path.suffix == ".pt":
                torch.save(content, file)
            elif path.suffix == ".json":
                file.write(json.dumps(content, indent=1, allow_nan=False).encode())
            else:
                file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        with contextlib.suppress(FileNotFoundError):                 # another writer renamed it
            for old in path.parent.glob(".*.critkl"):                # of a writer that was killed
                if time.time() - old.stat().st_mtime > 3600:
                    old.unlink()
    except (OSError, RuntimeError) as error:                         # torch raises both
        raise UserError(f"{path}: cannot be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()

def load(path, settings, device="cpu", **parts):
    """The dict in a checkpoint, put into the parts (models and optimizers). Nothing is unpickled
    but tensors and plain values. Raises UserError on a file that is damaged, of other code, or of
    other settings than these."""
    try:
        with zipfile.ZipFile(path) as archive:                       # torch skips its checksums
            if archive.testzip():
                raise ValueError
        saved = dict(torch.load(path, map_location=device, weights_only=True))
        require_settings(path, saved["settings"], settings | dict(version=VERSION))
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    except (UserError, MemoryError):
        raise
    except Exception as error:  # what torch.load raises on other files is not documented
        raise UserError(f"{path}: not a checkpoint of critkl, damaged, or of another model "
                        f"({type(error).__name__})") from None
    return saved

def require_settings(path, found, expected):
    """Raises UserError where a file or folder has other settings than expected."""
    for name, value in expected.items():
        if found.get(name) != value:
            raise UserError(f"{path}: has {name} {found.get(name)}, not {value}")

def csv_text(rows):
    """Dicts of numbers as CSV; a name that a row lacks is empty there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names)]
    for row in rows:
        lines.append(",".join(f"{row[name]:.6g}" if name in row else "" for name in names))
    return "\n".join(lines) + "\n"

def peak_memory_mb(device):
    """Peak of this process on the CPU, of the allocator on CUDA, in MB; None where unknown."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource                                              # Windows has none
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)

# ---- What a run prints, and how it is stopped. Windows has no SIGHUP.

SIGNALS = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}

class Log:
    """Prints lines. As a context it also holds Ctrl-C, SIGTERM and SIGHUP: where a loop can save
    (`patient`), the first of them asks it to stop after a whole step (`stop_requested`); all others
    stop at once."""

    def __init__(self, quiet=False):
        self.quiet = quiet or RANK > 0
        self.last = time.monotonic()                                 # time of the last progress
        self.patient = self.stop_requested = False

    def __enter__(self):
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self.handlers = {number: signal.signal(number, self.on_signal) for number in heard}
        return self

    def __exit__(self, *_):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def on_signal(self, *_):
        if self.stop_requested or not self.patient:
            raise KeyboardInterrupt
        self.stop_requested = True

    def line(self, text):
        if self.quiet:
            return
        try:
            print(text, flush=True)
        except OSError:                                              # a closed pipe: go on silent
            self.quiet = True
            sys.stdout = open(os.devnull, "w")

    def progress(self, what, step, total, detail=""):
        """A line about the progress of a loop, every 20 seconds."""
        now = time.monotonic()
        if now - self.last >= 20:
            self.last = now
            self.line(f"{what} {step}/{total}  {detail}")

# ---- Runs: their folders, and what makes them go on where they were stopped.

def new_model(cfg, temperature=1.0):
    """A GPT as `cfg` has it, on its device."""
    model = GPT(cfg.layers, cfg.width, cfg.heads, cfg.window).to(cfg.device)
    model.temperature = temperature
    return model

def settings_that_count(cfg):
    """The settings that decide what a run computes."""
    return {name: value for name, value in asdict(cfg).items() if name not in FREE_FIELDS}

def versions():
    """What else decides the numbers of a run."""
    return dict(version=VERSION, torch=str(torch.__version__), processes=WORLD)

def fingerprint(settings):
    """16 hexadecimal digits that change with any of the settings."""
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]

def run_folder(cfg):
    """The folder of a run: its mode, a hash of its settings (or --name), its seed."""
    settings = settings_that_count(cfg) | versions()
    del settings["seed"]
    name = cfg.name or fingerprint(settings)[:8]
    return Path(cfg.out).expanduser() / f"{cfg.mode}-{name}-seed{cfg.seed}"

def read_config(folder):
    """The Config in a run folder's config.json. Raises UserError."""
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
        content = json.loads(text)
        require_settings(folder, content, dict(version=VERSION))
        return Config(**content["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: not a run folder of this version, {error}") from None

def open_run(cfg, folder):
    """Make a run folder, or check that the one there has the same settings. Raises UserError."""
    if (folder / "config.json").exists():
        require_settings(folder, asdict(read_config(folder)), settings_that_count(cfg))
    else:
        write(folder / "config.json", versions() | dict(
            python=platform.python_version(), machine=platform.platform(), settings=asdict(cfg)))

class Loop:
    """A loop that is kept in a file: it stops after a whole step when asked to, and goes on."""
    hint = ""                                                        # another way to go on

    def __init__(self, cfg, log, path, settings, total):
        self.cfg, self.log, self.path, self.settings = cfg, log, path, settings
        self.done, self.total = 0, total                             # steps

    def begin(self, **parts):
        """Before the first step: put what is saved into the parts (models and optimizers). Returns
        all that the file holds, None without one."""
        self.parts = parts
        self.began = time.monotonic()
        saved = None
        if self.path.exists():
            saved = load(self.path, self.settings, self.cfg.device, **parts)
            self.done = saved["done"]
            self.began -= saved["seconds"]
        self.log.patient = self.done < self.total
        return saved

    def seconds(self):
        return time.monotonic() - self.began

    def save(self, **more):
        """Write the file. Raises UserError where a weight is not finite; the old file stays."""
        models = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        if not all(p.isfinite().all() for model in models for p in model.parameters()):
            raise UserError(f"{self.path}: not written, a weight is not finite; the old one stays")
        states = {name: part.state_dict() for name, part in self.parts.items()}
        write(self.path, states | more | dict(
            settings=self.settings | dict(version=VERSION), done=self.done, seconds=self.seconds()))

    def save_or_stop(self, due):
        """After a step: save if due. If asked to stop, save and raise KeyboardInterrupt."""
        if due:
            self.save()
        if any(all_ranks(self.log.stop_requested)):
            if not due:
                self.save()
            self.log.line(f"stopped after {self.done} of {self.total}; to go on: the same command"
                          + self.hint)
            all_ranks(None)                                          # none ends before it is saved
            raise KeyboardInterrupt
        self.log.patient = self.done < self.total

class PretrainingRun(Loop):
    """The file of a pretrained model: made by the first run that needs it, for all that do."""

    def __init__(self, cfg, log, model, optimizers):
        settings = {name: getattr(cfg, name) for name in PRETRAINING_FIELDS} | versions()
        path = Path(cfg.out).expanduser() / f"pretrained-{fingerprint(settings)}.pt"
        super().__init__(cfg, log, path, settings, cfg.pretrain_steps)
        self.begin(model=model, **{f"optimizer{i}": x for i, x in enumerate(optimizers)})

    def step_done(self, loss):
        """After each step: count, show, save now and then; KeyboardInterrupt if asked to stop."""
        self.done += 1
        self.log.progress("pretraining", self.done, self.total, f"loss {loss:.4f}")
        self.save_or_stop(due=self.done % 500 == 0 or self.done == self.total)

class Run(Loop):
    """The folder of one run of RL. checkpoint.pt holds all that the run needs, the reference
    included: a copy of the folder goes on wherever there is such a device. metrics.csv is made from
    it."""

    def __init__(self, cfg, log, folder):
        open_run(cfg, folder)
        super().__init__(cfg, log, folder / "checkpoint.pt", settings_that_count(cfg),
                         cfg.iterations)
        self.folder = folder
        self.hint = f", or --resume {shlex.quote(str(folder))}"
        self.rows = []                                               # of metrics.csv
        self.recent = []                                             # diagnostics since the last

    def is_complete(self):
        """Whether there is a summary; it is printed."""
        try:
            text = summary_text(json.loads((self.folder / "summary.json").read_text()), self.cfg)
        except (OSError, ValueError, KeyError, TypeError):           # none, or damaged: made again
            return False
        self.log.line(f"{self.folder}: this run is complete\n{text}")
        return True

    def saved_reference(self):
        """For a run that goes on: a model and a time, into which `begin` puts the saved ones."""
        if self.path.exists():
            return new_model(self.cfg, self.cfg.temperature), 0.0

    def begin(self, pretrain_seconds, **parts):
        """Before the first iteration: restore what is saved, or evaluate for the first row."""
        saved = super().begin(**parts)
        self.pretrain_seconds = pretrain_seconds
        if saved:
            self.pretrain_seconds = saved["pretrain_seconds"]
            self.rows, self.recent = saved["rows"], saved["recent"]
            self.log.line(f"{self.folder}: goes on after iteration {self.done}")
        else:
            self.evaluate()
            self.save_or_stop(due=True)

    def iteration_done(self, sampled, info):
        """After each iteration: count, show, evaluate and save when due; KeyboardInterrupt if
        asked to stop."""
        self.done += 1
        self.recent.append(info)
        self.log.progress("iteration", self.done, self.total, f"reward {info['reward']:.2f}")
        if self.done == 1 and not sampled.correct.any():
            self.log.line("no reward: the pretrained model solved none of the problems, there is "
                          "nothing to learn from. More pretraining or a larger --dial helps.")
        if self.done % (2 * self.cfg.eval_every) == 0:
            self.show_sample(sampled)
        due = self.done % self.cfg.eval_every == 0 or self.done == self.total
        if due:
            self.evaluate()
        self.save_or_stop(due)

    def show_sample(self, sampled):
        (a, b), correct = sampled.problems[0], sampled.correct[0]
        answer = decode(sampled.ids[0, 1:][sampled.mask[0]])
        indented = answer.strip().replace("\n", "\n  ")
        self.log.line(f"  sampled, reward {correct:.0f}: {a}+{b}\n  {indented}")

    def evaluate(self):
        """A row of metrics.csv: success, critical tokens, diagnostics since the row before."""
        accuracy, critical = test_accuracy(self.parts["policy"], self.cfg, self.cfg.eval_problems)
        row = dict(iteration=self.done, seconds=self.seconds())
        row |= {f"accuracy_{name}": mean for name, (mean, _, _) in accuracy.items()} | critical
        for name in self.recent[0] if self.recent else ():
            row[name] = sum(info[name] for info in self.recent) / len(self.recent)
        self.rows.append(row)
        self.recent = []
        shown = [f"{name} {x:.3g}" for name, x in row.items()
                 if name.startswith("accuracy") or name in ("reward", "kl_ref", "masked")]
        self.log.line(f"iteration {self.done:4d}  {'  '.join(shown)}")

    def save(self):
        super().save(rows=self.rows, recent=self.recent, pretrain_seconds=self.pretrain_seconds)
        try:
            write(self.folder / "metrics.csv", csv_text(self.rows))
        except UserError as error:                                   # open in a spreadsheet: later
            self.log.line(f"warning: {error}")

    def end(self):
        """After the last iteration: the summary, on many test problems."""
        write(self.folder / "metrics.csv", csv_text(self.rows))
        cfg, policy, reference = self.cfg, self.parts["policy"], self.parts["reference"]
        after, critical_after = test_accuracy(policy, cfg, cfg.test_problems, self.log)
        before, critical_before = test_accuracy(reference, cfg, cfg.test_problems, self.log)
        critical = {name: dict(before=critical_before[name], after=critical_after[name])
                    for name in critical_before}
        pretraining, rl = self.pretrain_seconds, self.seconds()
        summary = dict(
            mode=cfg.mode, seed=cfg.seed,
            accuracy={name: mean for name, (mean, _, _) in after.items()},
            pretrained_accuracy={name: mean for name, (mean, _, _) in before.items()},
            intervals=dict(accuracy=after, pretrained_accuracy=before), critical_tokens=critical,
            seconds=dict(pretrain=pretraining, rl=rl, total=pretraining + rl),
            peak_memory_mb=peak_memory_mb(cfg.device),
            parameters=sum(p.numel() for p in policy.parameters()))
        write(self.folder / "summary.json", summary)
        self.log.line(f"{summary_text(summary, cfg)}; all of it in {self.folder}")

def summary_text(summary, cfg):
    """A summary as a table of success, and of the right n+1 commas."""
    before, after = summary["intervals"]["pretrained_accuracy"], summary["intervals"]["accuracy"]
    heading = f"after RL, {cfg.mode}" if cfg.iterations else "no RL"
    lines = [f"\nexpected success in %, {cfg.test_problems} held-out problems of varying lengths, "
             f"95% interval\n{'':8}{'pretrained':>22}{heading:>26}"]
    for name in after:
        lines.append(f"{name:8}{percent(before[name]):>22}{percent(after[name]):>26}")
    tokens = summary["critical_tokens"].items()
    commas = [p for name, p in tokens if name.endswith("_comma")]
    first = 100 * sum(p["before"] for p in commas) / len(commas)
    last = 100 * sum(p["after"] for p in commas) / len(commas)
    lines.append(f"commas  {first:22.1f}{last:26.1f}   (probability of the right n+1 comma)")
    seconds = summary["seconds"]
    lines.append(f"{seconds['pretrain']:.0f} s pretraining, {seconds['rl']:.0f} s RL and "
                 f"evaluation, {summary['peak_memory_mb'] or 0:.0f} MB at the peak")
    return "\n".join(lines)

def percent(values):
    """(mean, low, high) as "95.6 (95.2 to 96.0)"."""
    mean, low, high = [100 * x for x in values]
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"

# ---- Other modes: tables of a policy, one answer in colour, speed.

def chosen_policy(cfg, log, folder):
    """(pretrained model, policy to look at) of --checkpoint, else twice the pretrained model.
    Raises UserError before anything is written."""
    if not cfg.checkpoint:
        open_run(cfg, folder)
        reference, _ = pretrain(cfg, log)
        return reference, reference
    path = Path(cfg.checkpoint).expanduser() / "checkpoint.pt"
    reference = new_model(cfg, cfg.temperature)
    policy = copy.deepcopy(reference)
    settings = {name: getattr(cfg, name) for name in POLICY_FIELDS}
    load(path, settings, cfg.device, reference=reference, policy=policy)
    open_run(cfg, folder)
    return reference, policy

def evaluate(cfg, log, folder):
    """Writes evaluation.json: success at N to N+3 ([V] tables 4 and 5) of a policy; of the
    pretrained model table 1 and the critical tokens by definition; and 2,000 tokens as a bfloat16
    sampler and the trainer see them, [Q] fig. 2."""
    reference, policy = chosen_policy(cfg, log, folder)
    log.line(f"{'set':10} {'digits':6} {'sampled':>22} {'greedy':>22} {'expected':>22}   in %, "
             "95% interval")
    rows = []
    for kind in ("identical", "varying"):
        for k, name in enumerate(SETS):
            problems = test_set(cfg.digits + k, cfg.test_problems, cfg.seed, kind)
            expected, _ = examine(policy, problems, cfg.digits, log)
            row = dict(
                sampled=interval(graded(policy, problems, log, (cfg.seed, "evaluate", kind, k))),
                greedy=interval(graded(policy, problems, log)),
                expected=interval(expected))
            rows.append(dict(set=kind, digits=name) | row)
            cells = " ".join(f"{percent(values):>22}" for values in row.values())
            log.line(f"{kind:10} {name:6} {cells}")
    problems = test_set(cfg.digits + 1, min(50, cfg.test_problems), cfg.seed)
    gap, definition = critical_evidence(reference, problems, cfg)
    log.line("certainty of the pretrained model on a token less its mean on the others:")
    for name, values in gap.items():
        log.line("  {:16} {:.4f} ({:.4f} to {:.4f})".format(name, *values))
    log.line("tokens of these answers:")
    for name, count in definition.items():
        log.line(f"  {name:24} {count}")
    sampled = rollout(copy.deepcopy(policy).bfloat16(), problems, seed=0)
    actions = sampled.ids[:, 1:]
    mu = token_logp(sampled.logits, actions)
    pi = token_logp(score(policy, sampled.ids), actions)
    pairs = torch.stack((mu, pi), dim=-1)[sampled.mask].exp()[:2000].tolist()
    write(folder / "evaluation.json", dict(
        rows=rows, certainty_gap=gap, definition=definition, sampler=pairs))
    log.line(f"written to {folder}")

def graded(policy, problems, log, key=None):
    """(n,) 1 where the policy's answer is right, else 0: sampled with a key, else greedy."""
    correct = []
    for i in range(0, len(problems), 100):
        seed = None if key is None else stream(*key, i).getrandbits(63)
        correct.append(rollout(policy, problems[i:i + 100], seed).correct.cpu())
        log.progress("answering", min(i + 100, len(problems)), len(problems))
    return torch.cat(correct)

def critical_evidence(reference, problems, cfg, uncertain_below=0.9):
    """What makes a token critical, [V] section 3.3, on the true answers. Returns (gap, counts).

    gap, table 1: certainty on the listed tokens (`critical_tokens`), on the commas among them and
    on the others, each less the mean on the rest of its answer; mean over answers and its interval.
    counts: tokens that are listed; uncertain (J below the threshold and among the ten lowest of the
    answer); decisive (after the true character the greedy answer is right, after a wrong one not).
    """
    ids, mask = true_batch(problems, reference.device)
    certainties = reference_certainty(score(reference, ids), cfg)
    gaps = {"critical": [], "critical commas": [], "non-critical": []}
    listed, uncertain = set(), set()
    for i, (a, b) in enumerate(problems):
        J = certainties[i][mask[i]].cpu()
        gap = J - (J.sum() - J) / (len(J) - 1)                       # less the mean of the others
        found = critical_tokens(a, b, cfg.digits)
        critical = sorted(found.values())
        commas = [t for name, t in found.items() if name.endswith("comma")]
        others = [t for t in range(len(J)) if t not in critical]
        gaps["critical"].append(gap[critical].mean())
        gaps["critical commas"].append(gap[commas].mean())
        gaps["non-critical"].append(gap[others].mean())
        listed |= {(i, t) for t in critical}
        uncertain |= {(i, t) for t in J.argsort()[:10].tolist() if J[t] < uncertain_below}
    places = sorted(listed | uncertain)
    _, after_true = force(reference, problems, places, wrong=False)
    _, after_wrong = force(reference, problems, places)
    outcomes = zip(places, after_true & ~after_wrong)
    decisive = {place for place, is_decisive in outcomes if is_decisive}
    return {name: interval(torch.stack(values)) for name, values in gaps.items()}, {
        "listed": len(listed),
        "listed and decisive": len(listed & decisive),
        "uncertain": len(uncertain),
        "uncertain and decisive": len(uncertain & decisive),
        "listed and uncertain": len(listed & uncertain),
        "all three": len(listed & uncertain & decisive)}

def inspect(cfg, log, folder):
    """[V] fig. 5: the greedy answer, each character coloured by the certainty of the pretrained
    model. Writes inspect.json with the five likeliest characters of both policies at each place."""
    a, b = map(int, cfg.problem.split("+"))
    reference, policy = chosen_policy(cfg, log, folder)
    answer = rollout(policy, [(a, b)])
    logits_ref = score(reference, answer.ids)
    J = reference_certainty(logits_ref, cfg)[answer.mask]
    text = decode(answer.ids[:, 1:][answer.mask])
    correct = bool(answer.correct[0])
    coloured = "".join(map(in_colour, text, J.tolist())) + "\033[0m"
    log.line(prompt(a, b) + (coloured if sys.stdout.isatty() else text))
    log.line(f"{'right' if correct else 'wrong'}: {a}+{b}={a + b}; the pretrained model is least "
             "certain at")
    for i in J.argsort()[:5].tolist():
        log.line(f"  J = {J[i]:.3f}  {text[max(0, i - 16):i]!r} then {text[i]!r}")
    write(folder / "inspect.json", dict(
        problem=cfg.problem, text=text, correct=correct, certainty=J.tolist(),
        weight=kl_weight(J, cfg.beta).tolist(),
        pretrained=likeliest(logits_ref[answer.mask]),
        policy=likeliest(score(policy, answer.ids)[answer.mask])))

def in_colour(character, J):
    """For a terminal: red where J is below 0.9, yellow below 0.99, else plain."""
    colour = 31 if J < 0.9 else 33 if J < 0.99 else 0
    return f"\033[{colour}m{character}"

def likeliest(logits, count=5):
    """(n, V) to n lists of the likeliest characters, each a pair (character, probability)."""
    p, ids = logits.softmax(-1).topk(count)
    return [list(zip(decode(row), values)) for row, values in zip(ids, p.tolist())]

def bench(cfg, log, folder):
    """Time, tokens/s and peak memory so far of each phase, to bench.json. Tokens are prompt and
    response without padding; pretraining is four steps."""
    open_run(cfg, folder)
    policy, _ = pretrain(cfg, log)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    optimizers = pretraining_optimizers(reference, cfg)
    problems = draw_problems(0, [], cfg)
    sampled = rollout(policy, problems, seed=0)
    batch = prepare(sampled, policy, reference, cfg)
    tokens = int((sampled.ids != TOKEN_ID[PAD]).sum())
    batches = pretraining_batches(cfg, 0)
    pretraining_tokens = sum(len(text) + len(answer) for text, answer in sum(batches, []))

    def four_steps():
        for examples in batches:
            pretraining_step(reference, optimizers, examples, lr=0.0)

    partial = functools.partial
    phases = {}
    for name, call, n in (
            ("sampling", partial(rollout, policy, problems, seed=0), tokens),
            ("scoring", partial(prepare, sampled, policy, reference, cfg), tokens),
            ("update", partial(update, policy, optimizer, batch, cfg, 0), tokens * cfg.epochs),
            ("pretraining", four_steps, pretraining_tokens)):
        seconds = mean_seconds(call, cfg)
        peak = peak_memory_mb(cfg.device)
        phases[name] = dict(seconds=seconds, tokens_per_second=n / seconds, peak_memory_mb=peak)
        log.line(f"{name:12} {seconds:8.3f} s {n / seconds:10.0f} tokens/s, "
                 f"{peak or 0:.0f} MB at the peak so far")
    result = dict(device=cfg.device, threads=cfg.threads, phases=phases)
    write(folder / "bench.json", result)
    if cfg.json:
        print(json.dumps(result))

def mean_seconds(call, cfg):
    """Mean time of three calls, after two to warm up."""
    from torch.utils.benchmark import Timer                          # imports much: only when asked
    return Timer("call()", globals=dict(call=call), num_threads=cfg.threads).timeit(3).mean

# ---- Command line.

def make_config(given):
    """Config from the settings `given` by name. Later ones win: defaults, preset, mode, method,
    given. Raises UserError on a value that is not allowed, or a given one without effect."""
    values = {f.name: f.default for f in fields(Config)}
    values |= PRESETS.get(given.get("preset"), {})
    values |= MODE_SETTINGS.get(given.get("mode", values["mode"]), {})
    values |= METHODS.get(given.get("method", values["method"]), {})
    values |= given
    cfg = Config(**values)                                           # checks each value
    for f in fields(Config):
        other, needed = f.metadata["needs"] or ("mode", MODES)
        if f.name in given and values[f.name] != f.default and values[other] not in needed:
            raise UserError(f"{flag(f.name, values[f.name])}: has no effect with "
                            f"{flag(other, values[other])}")
    if cfg.dial == 0 and given.get("mistakes"):
        raise UserError(f"{flag('mistakes', cfg.mistakes)}: has no effect with --dial 0")
    return cfg

class Parser(argparse.ArgumentParser):
    def error(self, message):                                        # one line, without the usage
        raise UserError(message)

def parse(argv):
    """Command line to Config, and the folder of --resume or None; flags, types and help come from
    Config's fields."""
    parser = Parser(
        prog="critkl.py", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description=__doc__.split("\n\n")[0],
        epilog="Defaults are those of preset laptop; presets, modes and methods change some.")
    for f in fields(Config):
        text = f"{f.metadata['help']} (default: {f.default})"
        if f.metadata["needs"]:
            other, values = f.metadata["needs"]
            text += f"; only with {other} {', '.join(values)}"
        kind = dict(type=f.type, choices=f.metadata["choices"])
        if f.type is bool:
            kind = dict(action="store_true")
        parser.add_argument("--" + f.name.replace("_", "-"), help=text, **kind)
    parser.add_argument("--resume", metavar="RUN_FOLDER",
                        help="go on with a stopped run, with its own settings")
    given = vars(parser.parse_args(argv))
    if "resume" in given:
        folder = Path(given.pop("resume")).expanduser().resolve()
        saved = asdict(read_config(folder))
        require_settings(f"--resume {folder}", saved, given)
        return Config(**saved | dict(out=str(folder.parent))), folder
    if given.get("mode") in ("evaluate", "inspect") and given.get("checkpoint"):
        # the policy's settings; a default is left out, since a given one counts as without effect
        made = read_config(Path(given["checkpoint"]).expanduser())
        given = {name: getattr(made, name) for name in POLICY_FIELDS
                 if getattr(made, name) != getattr(Config, name)} | given
    return make_config(given), None

def start(cfg):
    """Resolve device and threads into `cfg`. Raises UserError where the device is not there."""
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.device.startswith("cuda"):
        # under torchrun "cuda" is another GPU in each process, but the same setting in all
        number = int(cfg.device.partition(":")[2] or os.environ.get("LOCAL_RANK", 0))
        if number >= torch.cuda.device_count():
            raise UserError(f"--device {cfg.device}: no CUDA device {number} here; allowed is cpu")
        torch.cuda.set_device(number)
    if cfg.device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: there is none here; allowed is cpu")
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    cfg.threads = torch.get_num_threads()

def describe(cfg, folder):
    """What a run is, in a line: the settings that are not the defaults, and where it goes."""
    changed = [flag(f.name, getattr(cfg, f.name)) for f in fields(Config)
               if getattr(cfg, f.name) != f.default and f.name not in ("mode", "device")]
    return (f"critkl {VERSION}, --mode {cfg.mode} {' '.join(changed)}".rstrip()
            + f", on {cfg.device}, {cfg.threads} thread{'s' * (cfg.threads > 1)}; in {folder}")

def main(argv=None):
    """Run a command line; returns the exit code."""
    modes = dict(evaluate=evaluate, inspect=inspect, bench=bench)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")                     # a name it cannot show
    try:
        cfg, folder = parse(argv)
        start(cfg)
        join_processes(cfg)
        folder = folder or run_folder(cfg)
        with Log(quiet=cfg.json) as log:
            log.line(describe(cfg, folder))
            modes.get(cfg.mode, train)(cfg, log, folder)
        return 0
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise                                                    # else: out of memory
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"critkl.py: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    code = main()
    if WORLD > 1:
        os._exit(code)                                               # gloo's threads can abort exit
    sys.exit(code)
