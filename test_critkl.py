"""Tests of critkl.py, in its order: `python -m pytest test_critkl.py`, with `-n 2` on two cores.

Expected numbers are worked by hand or by a slow loop written from the definition, never by the code
under test. Nothing here asserts a time. Models are tiny and N = 1 wherever it does not matter. Runs
go through `main` in this process; a few are processes of their own.
"""
import contextlib
import copy
import csv
import dataclasses
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from hypothesis import given, settings, strategies as st

import critkl
from critkl import (
    VOCABULARY, GPT, Batch, UserError, certainty, close_early, collate, critical_tokens, decode,
    divergence, encode, entropy, examine, gae, generate, generate_drafted, gumbel, held_out,
    interval, is_correct, kl_estimate, kl_exact, kl_weight, make_config, masked_mean, policy_loss,
    ppo_loss, prepare, pretraining_example, prompt, rollout, scratchpad, stream, token_logp,
    true_batch, trust_region_mask, update, whiten)

torch.set_num_threads(1)
settings.register_profile("tests", max_examples=100, deadline=None, derandomize=True,
                          database=None)
settings.load_profile("tests")
NAN, INF = math.nan, math.inf
KINDS = ("binary_tv", "binary_kl", "topk_tv", "topk_kl", "tv", "kl")
PROBLEMS = [(3, 4), (7, 8), (5, 16)]


def digest(tensors):
    """A hash of a dict of tensors, and of dicts and lists of them: every bit counts."""
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(tensors), buffer)
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def close(x, expected, tolerance=1e-5):
    """Same shape, all finite, equal up to the absolute or relative tolerance."""
    x, expected = (torch.as_tensor(y, dtype=torch.float64).detach() for y in (x, expected))
    assert x.shape == expected.shape and x.isfinite().all(), (x, expected)
    assert torch.allclose(x, expected, rtol=tolerance, atol=tolerance), f"{x} is not {expected}"


def logits_of(*p):
    return torch.tensor(p).log()


def generator():
    return torch.Generator().manual_seed(0)


def random_ids(*shape):
    return torch.randint(1, 41, shape, generator=generator())


def config(mode="critical", method=None, **more):
    """A Config for tiny models. More settings are set as they are, also out of bounds."""
    given = dict(mode=mode, digits=1, layers=1, width=16, heads=2, device="cpu", episodes=4,
                 minibatch=4)
    cfg = make_config(given | (dict(method=method) if method else {}))
    for name, value in more.items():
        assert hasattr(cfg, name)
        setattr(cfg, name, value)
    return cfg


def random_model(seed=0, window=0):
    """Random weights in every layer (a new GPT is uniform), logits of standard deviation 2.4."""
    torch.manual_seed(seed)
    model = GPT(2, 16, 2, window)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.normal_(model.embedding.weight, std=0.6)
    return model


@functools.cache
def coin_model(heads=1):
    """Trained on two problems; sure of all but the answer: right in heads of 3 cases, else "0"."""
    torch.manual_seed(0)
    model, problems = GPT(2, 64, 2), PROBLEMS[:2]
    for p in model.blocks.parameters():
        if not p.any():                                              # a new GPT has zeros here
            torch.nn.init.normal_(p, std=0.05)
    right = [encode(scratchpad(*p)) for p in problems]
    wrong = [encode(scratchpad(*p).partition("</scratch>\n")[0] + "</scratch>\n0\n")
             for p in problems]
    prompts = [encode(prompt(*p)) for p in problems]
    ids, mask = collate(prompts * 3, right * heads + wrong * (3 - heads))
    optimizers = critkl.pretraining_optimizers(model, config())
    for step in range(100):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 100)
            optimizer.zero_grad()
        (-masked_mean(token_logp(model(ids[:, :-1])[0], ids[:, 1:]), mask)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


ROLLOUTS = {}


def prepared(cfg, policy, reference, mu=None):
    """The Batch of rollouts of mu (else of the policy), half of them called right. The rollouts of
    equal weights are made once."""
    problems = [(3, 4), (7, 8), (0, 0), (99, 1)][:cfg.episodes]
    sampler = mu or policy
    key = digest(sampler.state_dict()), sampler.temperature, cfg.episodes
    if key not in ROLLOUTS:
        ROLLOUTS[key] = rollout(sampler, problems, seed=1)
    sampled = copy.deepcopy(ROLLOUTS[key])
    sampled.correct = torch.arange(cfg.episodes) % 2.0               # a random model never is
    return prepare(sampled, policy, reference, cfg)


def gradient(loss, model):
    """Of all parameters, as one vector."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    full = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters)]
    return torch.cat([g.flatten() for g in full])


def loss_and_gradient(cfg, batch, policy):
    loss, _ = ppo_loss(policy, batch, cfg)
    return torch.cat((loss[None], gradient(loss, policy)))


# --------------------------------------------------------------------------------------------------
# Configuration.

@pytest.mark.parametrize("given, expected", [
    (dict(mode="none"), dict(penalty="none", trust_region="clip")),
    (dict(mode="standard"), dict(penalty="standard", trust_region="clip")),
    (dict(mode="critical"), dict(penalty="critical", trust_region="clip", beta=150.0,
                                 kl_kind="k2")),
    (dict(mode="dppo"), dict(penalty="none", trust_region="divergence", delta=0.15)),
    (dict(mode="dppo", divergence="topk_kl"), dict(top_k=20)),
    (dict(method="minirl_tis"), dict(trust_region="clip", eps_low=0.2, eps_high=0.28,
                                     anchor="recomputed", ratio_cap=3.0)),
    (dict(method="cispo"), dict(trust_region="none", ratio_cap=3.0, anchor="rollout")),
    (dict(method="negative_only"), dict(trust_region="negative", delta=0.5)),
    (dict(preset="paper"), dict(digits=7, epochs=1, lr=1e-6, alpha=5.0, value_coef=0.1,
                                entropy_coef=5e-4)),
    (dict(preset="laptop7", mode="dppo", trust_region="divergence", dial=0.5),
     dict(digits=7, trust_region="divergence", dial=0.5)),
    (dict(mode="dppo", method="cispo"), dict(trust_region="none", ratio_cap=3.0))])
def test_modes_and_presets_set_defaults_only(given, expected):
    cfg = make_config(given)
    assert {name: getattr(cfg, name) for name in expected} == expected


NUMBERS_OF_CONFIG = [f for f in dataclasses.fields(critkl.Config) if f.type in (int, float)]


@pytest.mark.parametrize("field", NUMBERS_OF_CONFIG, ids=lambda f: f.name)
def test_every_number_outside_its_range_is_named(field):
    low, high = field.metadata["low"], field.metadata["high"]
    for value in (NAN, INF, low - 1, high + 1, 10 ** 60, True, "3", None):
        with pytest.raises(UserError, match=re.escape(f"--{field.name.replace('_', '-')} {value}")):
            make_config({field.name: value})


@pytest.mark.parametrize("line", [
    "--divergence kl", "--divergence kl --mode standard", "--delta 0.3", "--group 4",
    "--problem 1+2", "--json", "--checkpoint runs", "--alpha 3 --mode none", "--beta 3 --mode none",
    "--beta 3 --mode standard", "--kl-kind k1 --mode dppo", "--certainty max_prob --mode standard",
    "--certainty-temperature 4 --mode none", "--eps-low 0.1 --mode dppo",
    "--eps-high 0.1 --method cispo", "--top-k 5 --mode dppo", "--relax both --method dppo",
    "--relax-below 0.3", "--anchor recomputed --method pg_is", "--gamma 0.9 --advantage group",
    "--lam 0.9 --advantage group", "--value-coef 0.5 --advantage group", "--lr 0.1 --mode pretrain",
    "--iterations 5 --mode pretrain", "--episodes 32 --mode evaluate", "--fixed 3 --mode bench",
    "--lr 0.1 --mode bench", "--sampler-dtype bfloat16 --mode bench",
    "--eval-every 3 --mode evaluate", "--staleness 2 --mode inspect --problem 1+2",
    "--mistakes 0.5 --dial 0", "--mistakes 0.5 --preset laptop7"])
def test_a_setting_without_effect_is_refused(line):
    """It would only make another folder with the same numbers."""
    with pytest.raises(UserError, match=re.escape(" ".join(line.split()[:2]).replace(
            "--json", "--json True"))):
        critkl.parse(line.split())


@pytest.mark.parametrize("line", [
    "--penalty critical --mode none", "--penalty standard", "--penalty none --mode standard",
    "--iterations 5 --mode pretrain"])
def test_a_setting_against_the_mode_is_refused(line):
    """A folder named after the mode would hold another one's run."""
    with pytest.raises(UserError, match=re.escape(" ".join(line.split()[:2]))):
        critkl.parse(line.split())


@pytest.mark.parametrize("line", [
    "--mode dppo --divergence kl --delta 0.05", "--method negative_only --delta 0.8",
    "--advantage group --group 4", "--mode inspect --problem 1+2", "--mode bench --json",
    "--mode dppo --divergence topk_kl --top-k 5", "--relax low --relax-below 0.3",
    "--method minirl --eps-high 0.3", "--dial 0 --mistakes 0", "--preset laptop7 --mistakes 0",
    "--penalty critical", "--mode standard --method dppo", "--mode dppo --penalty critical"])
def test_a_setting_with_an_effect_is_taken(line):
    critkl.parse(line.split())


# --------------------------------------------------------------------------------------------------
# Tokens.

@given(st.text(VOCABULARY))
def test_41_tokens_round_trip(text):
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 41
    ids = encode(text)
    assert decode(ids) == decode(torch.tensor(ids, dtype=torch.long)) == text


@pytest.mark.parametrize("character", ["x", "٣", "３", "\r", "\0", "é"])
def test_unknown_character_is_named(character):
    with pytest.raises(UserError, match=re.escape(repr(character))):
        encode("12" + character + "4")


# --------------------------------------------------------------------------------------------------
# Environment.

LAYOUTS = {
    (128, 367): """
<scratch>
[1,2,8] + [3,6,7] , A=[] , C=0 , 8+7+0=15 , A->5 , C->1
[1,2] + [3,6] , A=[5] , C=1 , 2+6+1=9 , A->9 , C->0
[1] + [3] , A=[9,5] , C=0 , 1+3+0=4 , A->4 , C->0
[] + [] , A=[4,9,5] C=0 , END
</scratch>
4 9 5
""",
    (5, 1234): """
<scratch>
[5] + [1,2,3,4] , A=[] , C=0 , 5+4+0=9 , A->9 , C->0
[] + [1,2,3] , A=[9] , C=0 , 0+3+0=3 , A->3 , C->0
[] + [1,2] , A=[3,9] , C=0 , 0+2+0=2 , A->2 , C->0
[] + [1] , A=[2,3,9] , C=0 , 0+1+0=1 , A->1 , C->0
[] + [] , A=[1,2,3,9] C=0 , END
</scratch>
1 2 3 9
""",
    (0, 0): """
<scratch>
[0] + [0] , A=[] , C=0 , 0+0+0=0 , A->0 , C->0
[] + [] , A=[0] C=0 , END
</scratch>
0
""",
    (99, 1): """
<scratch>
[9,9] + [1] , A=[] , C=0 , 9+1+0=10 , A->0 , C->1
[9] + [] , A=[0] , C=1 , 9+0+1=10 , A->0 , C->1
[] + [] , A=[0,0] C=1 , END
</scratch>
1 0 0
"""}


@pytest.mark.parametrize("problem", LAYOUTS)
def test_layout_character_for_character(problem):
    assert scratchpad(*problem) == LAYOUTS[problem]
    assert prompt(*problem) == "Input:\n%d+%d\nTarget:" % problem
    assert [len(scratchpad(10 ** n - 1, 10 ** n - 1)) for n in (3, 4, 5)] == [220, 289, 364]


NUMBERS = st.integers(1, 12).flatmap(
    lambda n: st.integers(10 ** (n - 1) if n > 1 else 0, 10 ** n - 1))


@given(NUMBERS, NUMBERS)
def test_scratchpad_against_integer_arithmetic(a, b):
    """Each line from a, b and its number k alone, by division and remainder; it is graded right."""
    def left(x, k):
        return ",".join(str(x)[:max(0, len(str(x)) - k)])

    lines, length = [], max(len(str(a)), len(str(b)))
    for k in range(length + 1):
        i, j = a // 10 ** k % 10, b // 10 ** k % 10
        carry = (a % 10 ** k + b % 10 ** k) // 10 ** k
        done = ",".join(str((a + b) % 10 ** k).zfill(k)) if k else ""
        total = i + j + carry
        step = f" , C={carry} , {i}+{j}+{carry}={total} , A->{total % 10} , C->{total // 10}"
        end = f" C={carry} , END"
        head = f"[{left(a, k)}] + [{left(b, k)}] , A=[{done}]"
        lines.append(head + (step if k < length else end))
    result = " ".join(str(a + b))
    assert scratchpad(a, b) == "\n".join(["", "<scratch>", *lines, "</scratch>", result, ""])
    assert is_correct(a, b, scratchpad(a, b)) and not is_correct(a, b + 1, scratchpad(a, b))


@pytest.mark.parametrize("answer", [
    "4 9 6\n", "495\n", "4 9 5", "4 9 5 \n", " 4 9 5\n", "4  9 5\n", "+4 9 5\n", "-4 9 5\n",
    "0 4 9 5\n", "4 9 5 0\n", "4_9_5\n", "4 9 5.0\n", "4\t9\t5\n", "4 9 5\r\n", "\n4 9 5\n",
    "４ ９ ５\n", "٤ ٩ ٥\n", "4 9 5\u2028", "4 9 5\0\n", "", "4 9 \n5\n",
    "4 9 6\n</scratch>\n4 9 5\n"])
def test_grader_refuses(answer):
    assert not is_correct(128, 367, "\n<scratch>\n</scratch>\n" + answer)


FRAGMENTS = st.one_of(
    st.text(max_size=5), st.sampled_from(["</scratch>", "</scratch>\n", "4 9 5", "4 9 5\n", " "]))


@given(st.lists(FRAGMENTS, max_size=6).map("".join))
def test_grader_survives_any_text_and_reads_the_line_after_the_scratchpad(text):
    after = text.split("</scratch>\n", 1)[1:]
    assert is_correct(128, 367, text) == any(answer.startswith("4 9 5\n") for answer in after)


@pytest.mark.parametrize("text", [
    "12x+3", "", "12", "1+2+3", "+5+1", "1_0+1", "٣+1", "３+1", " 1+2", "1+2\n", "01+2", "-1+2",
    "1+" + "9" * 31])
def test_problem_text(text):
    for right in ("2033+5179", "0+0", "1+" + "9" * 30):
        assert make_config(dict(mode="inspect", problem=right)).problem == right
    with pytest.raises(UserError, match="--problem"):
        make_config(dict(mode="inspect", problem=text))


def lengths(problems):
    return [(len(str(a)), len(str(b))) for a, b in problems]


def examples(cfg, count, seed=0):
    """(a, b, response) of pretraining examples."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        text, response = pretraining_example(rng, cfg)
        a, b = map(int, re.fullmatch(r"Input:\n(\d+)\+(\d+)\nTarget:", text).groups())
        found.append((a, b, response))
    return found


def test_all_numbers_of_n_digits_are_drawn():
    """0 to 9, 10 to 99, 100 to 999: each of them, and no other."""
    rng = random.Random(0)
    for n, low, high, count in ((1, 0, 9, 200), (2, 10, 99, 1500), (3, 100, 999, 6000)):
        drawn = {number for i in range(count) for number in critkl.draw(rng, n, n, test=i % 9 == 0)}
        assert drawn == set(range(low, high + 1))


@pytest.mark.parametrize("extra", [1, 2])
def test_lengths_of_rl_problems(extra):
    """One operand has N+k digits, the other 1 to N half of the time, else N+1 to N+k; any order."""
    cfg, rng, n = config(digits=2, extra=extra), random.Random(0), 2 + extra
    found = lengths(critkl.rl_problem(rng, cfg) for _ in range(2000))
    assert set(found) == {pair for m in range(1, n + 1) for pair in ((m, n), (n, m))}
    assert 0.45 < sum(min(pair) <= 2 for pair in found) / 2000 < 0.55
    assert 0.4 < sum(a < b for a, b in found) / sum(a != b for a, b in found) < 0.6


def test_lengths_of_pretraining_problems():
    """1 to N digits, balanced; N+1 for the share `dial` only, and never with dial 0."""
    def longest(dial):
        found = examples(config(digits=3, dial=dial), 3000)
        return [max(pair) for pair in lengths((a, b) for a, b, _ in found)]

    none, half, every = longest(0.0), longest(0.5), longest(1.0)
    assert max(none) == 3 and all(900 < none.count(n) < 1100 for n in (1, 2, 3))
    assert 1400 < half.count(4) < 1600 and set(every) == {4}


def test_evaluation_sets_and_training_problems_never_meet():
    """Nor does the mirror b+a of a test problem."""
    assert set(lengths(critkl.test_set(3, 500, 0, "identical"))) == {(3, 3)}
    assert set(lengths(critkl.test_set(3, 500, 0))) == {(1, 3), (2, 3), (3, 3), (3, 1), (3, 2)}
    cfg, rng = config(digits=1, dial=0.3), random.Random(0)
    seen = {critkl.rl_problem(rng, cfg) for _ in range(3000)}
    seen |= {(a, b) for a, b, _ in examples(cfg, 3000)}
    kept = {problem for n in (1, 2) for kind in ("identical", "varying")
            for problem in critkl.test_set(n, 500, 0, kind)}
    assert not seen & kept and not {(b, a) for a, b in seen} & kept
    pairs = list(itertools.combinations_with_replacement(range(200), 2))
    assert all(held_out(a, b) == held_out(b, a) for a, b in pairs)
    assert 0.08 < sum(held_out(a, b) for a, b in pairs) / len(pairs) < 0.12


def test_the_same_seed_gives_the_same_problems():
    def problems(seed):
        return [critkl.rl_problem(stream(seed, "x", 3), config()), *critkl.test_set(2, 50, seed)]

    def batches(seed, group):
        return critkl.pretraining_batches(config(seed=seed), group)

    assert problems(1) == problems(1) and problems(1) != problems(2)
    assert batches(0, 1) == batches(0, 1)
    assert batches(0, 1) != batches(0, 2) and batches(0, 1) != batches(1, 1)


def test_a_group_of_batches_is_cut_from_examples_sorted_by_length():
    cfg = config(digits=3, pretrain_batch=5)
    batches = critkl.pretraining_batches(cfg, 2)
    assert [len(batch) for batch in batches] == [5] * 4
    rng = stream(cfg.seed, "pretrain", 2)
    assert sorted(e for batch in batches for e in batch) == sorted(
        pretraining_example(rng, cfg) for _ in range(20))
    ranges = sorted((min(len(r) for _, r in batch), max(len(r) for _, r in batch))
                    for batch in batches)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    orders = [[len(batch[0][1]) for batch in critkl.pretraining_batches(cfg, i)] for i in range(5)]
    assert any(order != sorted(order) for order in orders)           # in no order of length


def test_problems_of_an_iteration():
    """New ones, or drawn from the fixed ones; each as often as its group has answers."""
    cfg = config(episodes=8)
    assert critkl.draw_problems(0, [], cfg) == critkl.draw_problems(0, [], cfg)
    assert critkl.draw_problems(0, [], cfg) != critkl.draw_problems(1, [], cfg)
    assert set(critkl.draw_problems(0, PROBLEMS, config(episodes=64))) == set(PROBLEMS)
    grouped = critkl.draw_problems(0, [], config(episodes=8, advantage="group", group=4))
    assert len(grouped) == 8 and grouped[:4] == grouped[:1] * 4 and grouped[4:] == grouped[4:5] * 4
    assert grouped[0] != grouped[4]


def test_collate_and_its_mask():
    """mask[:, t] where ids[:, t+1] is a response token: the first at the last prompt token."""
    ids, mask = collate([[5, 6, 7], [5, 6]], [[8, 9], [8, 9, 10, 11]])
    assert ids.tolist() == [[5, 6, 7, 8, 9, 0], [5, 6, 8, 9, 10, 11]]
    assert mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    texts = [decode(row[1:][m]) for row, m in zip(*true_batch(PROBLEMS))]
    assert texts == [scratchpad(*p) for p in PROBLEMS]


# --------------------------------------------------------------------------------------------------
# Planted mistakes (D2).

@pytest.mark.parametrize("digits, line, text, shorter", [
    (3, 1, "2033", "203"), (3, 1, "203", "203"), (3, 1, "3", "3"), (3, 1, "", ""),
    (3, 2, "203", "20"), (3, 2, "20", "20"), (3, 3, "20", "2"), (3, 3, "2", "2"),
    (3, 4, "20", "20"), (3, 1, "20334", "2033"), (1, 1, "34", "3"), (1, 2, "3", "3"),
    (1, 2, "34", "3"), (2, 3, "2", "2"), (7, 3, "123456", "12345"), (7, 3, "12345", "12345")])
def test_lists_that_are_closed_early(digits, line, text, shorter):
    """Lists longer than operands of N digits leave them, in lines 1 to 3; never by chance 0."""
    rng = random.Random(0)
    for q, expected in ((1.0, shorter), (0.0, text)):
        found = {close_early(text, line, config(digits=digits, mistakes=q), rng) for _ in range(50)}
        assert found == {expected}
    found = {close_early(text, line, config(digits=digits, mistakes=0.5), rng) for _ in range(50)}
    assert found == {text, shorter}


def always(digits):
    """The mistake of a cfg with probability 1, for scratchpad."""
    cfg = config(digits=digits, mistakes=1.0)
    return functools.partial(close_early, cfg=cfg, rng=random.Random(0))


@pytest.mark.parametrize("problem, digits, expected", [
    ((2033, 5179), 3, """
<scratch>
[2,0,3] + [5,1,7] , A=[] , C=0 , 3+7+0=10 , A->0 , C->1
[2,0] + [5,1] , A=[0] , C=1 , 0+1+1=2 , A->2 , C->0
[2] + [5] , A=[2,0] , C=0 , 2+5+0=7 , A->7 , C->0
[] + [] , A=[7,2,0] C=0 , END
</scratch>
7 2 0
"""), ((99, 7), 1, """
<scratch>
[9] + [7] , A=[] , C=0 , 9+7+0=16 , A->6 , C->1
[] + [] , A=[6] C=1 , END
</scratch>
1 6
"""), ((128, 367), 3, LAYOUTS[128, 367])])
def test_a_scratchpad_goes_on_from_its_mistake(problem, digits, expected):
    assert scratchpad(*problem, always(digits)) == expected


def test_a_mistake_in_a_later_line():
    """In line 2 alone: the first list loses its last digit there, the second stays whole."""
    def mistake(digits, line):
        return digits[:-1] if (line, digits) == (2, "203") else digits

    assert scratchpad(2033, 5179, mistake) == """
<scratch>
[2,0,3,3] + [5,1,7,9] , A=[] , C=0 , 3+9+0=12 , A->2 , C->1
[2,0] + [5,1,7] , A=[2] , C=1 , 0+7+1=8 , A->8 , C->0
[2] + [5,1] , A=[8,2] , C=0 , 2+1+0=3 , A->3 , C->0
[] + [5] , A=[3,8,2] , C=0 , 0+5+0=5 , A->5 , C->0
[] + [] , A=[5,3,8,2] C=0 , END
</scratch>
5 3 8 2
"""


STEP = re.compile(r"\[([\d,]*)\] \+ \[([\d,]*)\] , A=\[([\d,]*)\] , C=(\d) , "
                  r"(\d)\+(\d)\+(\d)=(\d+) , A->(\d) , C->(\d)")
LAST = re.compile(r"\[\] \+ \[\] , A=\[([\d,]*)\] C=(\d) , END")


def lists_of(a, b, response):
    """Checks that a scratchpad is consistent; returns its pairs of lists as texts."""
    head, tag, *lines, end, answer, rest = response.split("\n")
    assert (head, tag, end, rest) == ("", "<scratch>", "</scratch>", "")
    pairs, result, carry = [], "", "0"
    for line in lines[:-1]:
        x, y, found, c, i, j, c2, total, digit, next_carry = STEP.fullmatch(line).groups()
        x, y = x.replace(",", ""), y.replace(",", "")
        assert (found.replace(",", ""), c, c2) == (result, carry, carry)
        assert (i, j) == (x[-1:] or "0", y[-1:] or "0")
        assert int(total) == int(i) + int(j) + int(c) == 10 * int(next_carry) + int(digit)
        result, carry = digit + result, next_carry
        pairs.append((x, y))
    found, c = LAST.fullmatch(lines[-1]).groups()
    assert (found.replace(",", ""), c) == (result, carry)
    assert answer == " ".join(carry.replace("0", "") + result)
    return pairs


def losses(number, written):
    """Line numbers in which a list is shorter than the list before it leaves it."""
    found, expected = [], str(number)
    for line, digits in enumerate(written, 1):
        assert digits in (expected, expected[:-1])
        if digits != expected:
            found.append(line)
        expected = digits[:-1]
    assert expected == ""
    return found


@pytest.mark.parametrize("digits", [1, 3, 5])
def test_planted_mistakes_are_consistent_and_one_per_operand(digits):
    """Each list loses a digit with probability q by itself, in the lines 1 to 3 that can hold one
    too many; an operand of N+1 digits loses at most one, and shorter ones none."""
    q, cfg = 0.3, config(digits=digits, dial=1.0, mistakes=0.3)
    lost, possible, both = [0] * 4, [0] * 4, [0, 0]
    places = min(3, digits)
    for a, b, response in examples(cfg, 3000):
        pairs, firsts = lists_of(a, b, response), []
        for k, number in enumerate((a, b)):
            found = losses(number, [pair[k] for pair in pairs])
            assert len(found) <= 1 and set(found) <= set(range(1, places + 1))
            if len(str(number)) <= digits:
                assert not found
                continue
            firsts.append(found == [1])
            for line in range(1, places + 1):
                if not found or line <= found[0]:
                    possible[line] += 1
                    lost[line] += found == [line]
        if len(firsts) == 2:
            both[0] += all(firsts)
            both[1] += 1
    for line in range(1, places + 1):
        spread = math.sqrt(q * (1 - q) / possible[line])
        assert abs(lost[line] / possible[line] - q) < 4 * spread, line
    assert abs(both[0] / both[1] - q * q) < 4 * math.sqrt(0.09 * 0.91 / both[1])


def test_where_no_mistake_is_planted():
    """Mistakes 0 writes all scratchpads true; dial 0 has no list that could be closed early."""
    for cfg in (config(digits=3, dial=1.0, mistakes=0.0), config(digits=3, dial=0.0, mistakes=1.0)):
        assert all(response == scratchpad(a, b) for a, b, response in examples(cfg, 500))
    some = examples(config(digits=3, dial=0.5, mistakes=1.0), 500)
    assert all((response == scratchpad(a, b)) == (max(a, b) < 1000) for a, b, response in some)


# --------------------------------------------------------------------------------------------------
# Model.

@pytest.mark.parametrize("step, window", [(1, 0), (4, 0), (1, 3), (4, 3)])
@torch.no_grad()
def test_cached_steps_equal_the_full_pass(step, window):
    """Rows go on from different positions; what the cache holds beyond them is never seen."""
    model, ids = random_model(window=window), random_ids(3, 12)
    start = torch.tensor([3, 7, 5])
    cache, full = model.new_cache(3, 16) + 1e3, model(ids)
    model(ids[:, :7], cache)
    rows, columns = torch.arange(3)[:, None], start[:, None] + torch.arange(step)
    before = ids[rows, columns - 1]
    for cached, whole in zip(model(ids[rows, columns], cache, start, before), full):
        close(cached, whole[rows, columns])
        assert whole.std() > 0.1


@torch.no_grad()
def test_no_look_ahead_and_no_effect_of_padding():
    model, ids, changed = random_model(), random_ids(2, 12), random_ids(2, 12)
    changed[:, 8:] = 0
    for full, other, short in zip(model(ids), model(changed), model(ids[:, :8])):
        close(other[:, :8], full[:, :8])
        close(short, full[:, :8])
        assert (other[:, 8:] - full[:, 8:]).abs().max() > 0.1


@torch.no_grad()
def test_a_window_is_what_the_first_block_sees_and_the_others_have_no_positions():
    """With one block the last few tokens alone count. With two the last token sees all that the
    first block saw, "1119", "1191" ... , in any order alike; without a window the order counts."""
    model, ids, changed = GPT(1, 16, 2, 3), random_ids(1, 12), random_ids(1, 12)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5, generator=generator())
    changed[:, :5] = 1 + ids[:, :5] % 40                             # seen from 5 and 6 on
    one, other = model(ids)[0], model(changed)[0]
    close(one[:, 8:], other[:, 8:])
    assert ((one - other)[:, :7].abs().amax(-1) > 1e-3).all()
    texts = ("11191115111 2", "11151119111 2", "11151115111 2")
    orders = torch.tensor([encode(text.replace(" ", "")) for text in texts])
    last = random_model(window=3)(orders)[0][:, -1]
    close(last[0], last[1])
    assert (last[0] - last[2]).abs().max() > 1e-3
    last = random_model()(orders)[0][:, -1]
    assert (last[0] - last[1]).abs().max() > 1e-3


def test_temperature_divides_the_logits_of_a_model_that_trains_as_a_whole():
    """[0, 1] at T = 0.5: log-probabilities -2.1269, -0.1269."""
    close(token_logp(torch.tensor([[0.0, 1.0]] * 2) / 0.5, torch.tensor([0, 1])),
          [-2.1269, -0.1269], 1e-4)
    model, ids = random_model(), random_ids(2, 9)
    logits, values = model(ids)
    loss = logits.softmax(-1)[..., 3].sum() + values.square().sum()
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(loss, list(model.parameters())))
    model.temperature = 0.5
    close(model(ids)[0], logits / 0.5)
    assert entropy(GPT(1, 16, 2)(ids)[0]).min() > 0.99 * math.log(41)  # a new one knows nothing


def test_pretraining_does_not_know_the_temperature_of_rl(tmp_path):
    """Both runs would share one file, so that which came first would decide."""
    found = []
    for temperature in (1.0, 2.0):
        out = str(tmp_path / f"{temperature}")
        cfg = config(temperature=temperature, pretrain_steps=3, out=out)
        model, _ = critkl.pretrain(cfg, critkl.Log(quiet=True))
        assert model.temperature == temperature
        found.append(digest(model.state_dict()))
    assert found[0] == found[1]


def test_the_value_loss_trains_the_value_head_alone():
    model = random_model()
    loss = model(random_ids(2, 9))[1].square().sum()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    trained = {name for (name, _), g in zip(model.named_parameters(), found)
               if g is not None and g.any()}
    assert trained == {"value_head.weight", "value_head.bias"}


def test_a_model_as_the_settings_have_it():
    model = critkl.new_model(config(layers=2, window=4), temperature=2.0)
    assert (model.temperature, model.window, len(model.blocks)) == (2.0, 4, 2)


# --------------------------------------------------------------------------------------------------
# Pretraining.

def test_the_learning_rate_rises_and_falls():
    """Of 0.012 in 1000 steps: 5% at first, all of it in 19 steps, nearly 0 at the end."""
    cfg = config(pretrain_lr=0.012, pretrain_steps=1000)
    for step, share in ((0, 0.05), (10, 0.55), (18, 0.95), (19, 0.981), (20, 0.98), (500, 0.5),
                        (999, 0.001)):
        close(critkl.pretraining_lr(step, cfg), 0.012 * share, 1e-7)


def test_a_pretraining_step_by_hand():
    """The loss is the mean of -log p over the response tokens; lr 0 leaves the weights."""
    model, texts = random_model(), [(prompt(*p), scratchpad(*p)) for p in PROBLEMS]
    before = copy.deepcopy(model)
    optimizers = critkl.pretraining_optimizers(model, config())
    terms = []
    for text, response in texts:
        ids = torch.tensor([encode(text + response)])
        with torch.no_grad():
            logp = model(ids)[0].log_softmax(-1)[0]
        terms += [logp[t - 1, ids[0, t]] for t in range(len(text), ids.shape[1])]
    close(critkl.pretraining_step(model, optimizers, texts, 0.0), -sum(terms) / len(terms))
    pairs = list(zip(model.parameters(), before.parameters()))
    assert all(torch.equal(p, q) for p, q in pairs)
    critkl.pretraining_step(model, optimizers, texts, 0.01)
    assert all(not torch.equal(p, q) for (p, q), (name, _) in zip(pairs, model.named_parameters())
               if not name.startswith("value_head"))                # which has no gradient here


@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_a_pretraining_step_that_is_not_finite_is_not_made(where):
    model, texts = random_model(), [(prompt(*p), scratchpad(*p)) for p in PROBLEMS]
    optimizers = critkl.pretraining_optimizers(model, config())
    critkl.pretraining_step(model, optimizers, texts, 0.0)           # this one is finite
    if where == "weight":
        model.embedding.weight.data[3] = NAN
    else:
        model.embedding.weight.register_hook(lambda gradient: gradient * INF)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=dict(weight="loss is nan", gradient="gradient is")[where]):
        critkl.pretraining_step(model, optimizers, texts, 0.01)
    for name, x in model.state_dict().items():
        assert torch.equal(x.nan_to_num(7), before[name].nan_to_num(7))


def test_muon_orthogonalizes():
    """Of a matrix with singular values 5 to 9 the step has all near 1, in the same bases."""
    u, _ = torch.linalg.qr(torch.randn(9, 9, generator=generator()))
    v, _ = torch.linalg.qr(torch.randn(5, 5, generator=generator()))
    tall = u[:, :5] * torch.arange(5, 10) @ v.T
    for matrix, expected in ((tall, u[:, :5] @ v.T), (tall.T, v @ u[:, :5].T)):
        found = critkl.orthogonalize(matrix)
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.6 and values.max() < 1.3
        assert (found - expected).abs().max() < 0.3


# --------------------------------------------------------------------------------------------------
# Sampling.

@torch.no_grad()
def decode_slowly(model, start, limit, noise=None, text=""):
    """One token at a time, without cache or draft: what both samplers must equal. text: the part of
    a response that `start` ends with."""
    ids, said = list(start), text
    while len(ids) < len(start) + limit and text.partition("/")[2].count("\n") < 2:
        logits = model(torch.tensor([ids]))[0][0, -1]
        ids.append(int((logits if noise is None else logits + noise[len(ids)]).argmax()))
        text = said + decode(ids[len(start):])
    return ids


@functools.cache
def sampling_case(kind, greedy):
    """Model, prompts, limit, noise and the slowly decoded texts of a random or trained model."""
    model, limit = (random_model(), 60) if kind == "random" else (coin_model(), 110)
    prompts = [encode(prompt(*p)) for p in PROBLEMS]
    noise = None if greedy else gumbel(5, 3, max(map(len, prompts)) + limit, 41)
    if kind == "random" and not greedy:
        noise[0, :, [critkl.NEWLINE, critkl.SLASH]] += 9             # ends soon, the last is cut
        noise[1, :, [critkl.NEWLINE, critkl.SLASH]] += 4
    slow = [decode_slowly(model, p, limit, None if greedy else noise[i])
            for i, p in enumerate(prompts)]
    if not greedy:
        assert len({len(s) - len(p) for s, p in zip(slow, prompts)}) > 1
    return model, prompts, limit, noise, slow


DRAFTS = dict(
    none=lambda p: [], right=lambda p: encode(scratchpad(*p)),
    wrong=lambda p: encode(scratchpad(8, 777)), garbage=lambda p: random_ids(50).tolist(),
    long=lambda p: encode(scratchpad(123456, 7)))


@pytest.mark.parametrize("draft, chunk", [
    ("plain", 0), *itertools.product(DRAFTS, (1, 5, 24))])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("kind", ["random", "trained"])
def test_sampling_equals_decoding_one_by_one(kind, greedy, draft, chunk):
    """Token for token from the same noise, whatever the draft; logits and values of a full pass."""
    model, prompts, limit, noise, slow = sampling_case(kind, greedy)
    if draft == "plain":
        ids, mask, logits, values = generate(model, prompts, limit, noise)
    else:
        drafts = [DRAFTS[draft](p) for p in PROBLEMS]
        ids, mask, logits, values = generate_drafted(model, prompts, drafts, limit, noise, chunk)
    assert ids.shape[1] == max(map(len, slow)) == mask.shape[1] + 1
    for start, row, m, expected in zip(prompts, ids.tolist(), mask, slow):
        assert row == expected + encode(critkl.PAD) * (len(row) - len(expected))
        assert m.nonzero().flatten().tolist() == list(range(len(start) - 1, len(expected) - 1))
    with torch.no_grad():
        full, full_values = model(ids[:, :-1])
    assert logits.shape == full.shape and values.shape == full_values.shape
    close(logits[mask], full[mask], 3e-5)
    close(values[mask], full_values[mask], 3e-5)


def test_samplers_agree_on_started_responses():
    """The end is the second newline after the first "/" of the response, wherever it began."""
    model, problem = coin_model(), PROBLEMS[0]
    response = scratchpad(*problem)
    for cut in (response.index("/") + 1, response.index("/") + 10, 5):
        start = encode(prompt(*problem) + response[:cut])
        slow = decode_slowly(model, start, 110, text=response[:cut])
        drafted, *_ = generate_drafted(model, [start], [[]], 110)
        plain, *_ = generate(model, [start], 110)
        assert drafted.tolist() == plain.tolist() == [slow]


@pytest.mark.parametrize("kind", ["random", "trained"])
def test_a_row_of_a_batch_equals_the_row_alone(kind):
    model, prompts, limit, noise, slow = sampling_case(kind, False)
    for i, start in enumerate(prompts):
        draft, own_noise = encode(scratchpad(*PROBLEMS[i])), noise[i:i + 1, :len(start) + limit]
        ids, *_ = generate_drafted(model, [start], [draft], limit, own_noise)
        plain, *_ = generate(model, [start], limit, own_noise)
        assert ids.tolist() == plain.tolist() == [slow[i]]


@pytest.mark.parametrize("sampler", ["plain", "drafted"])
@torch.no_grad()
def test_samples_follow_the_softmax(sampler):
    """The first two tokens of 6,000 samples against their probabilities, chi-square; a draft bends
    nothing."""
    model, start, n = random_model(3), encode("12+3"), 6000
    first = model(torch.tensor([start]))[0][0, -1].softmax(-1)
    second = model(torch.tensor([start + [i] for i in range(41)]))[0][:, -1].softmax(-1)
    expected = (first[:, None] * second).flatten() * n
    noise = gumbel(0, n, len(start) + 2, 41)
    if sampler == "plain":
        ids, *_ = generate(model, [start] * n, 2, noise)
    else:
        ids, *_ = generate_drafted(model, [start] * n, [[int(first.argmax()), 9]] * n, 2, noise)
    counts = torch.bincount(ids[:, -2] * 41 + ids[:, -1], minlength=41 * 41).float()
    large = expected >= 5
    expected, counts = (torch.cat((x[large], x[~large].sum()[None])) for x in (expected, counts))
    chi, freedom = ((counts - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom > 30 and abs(chi - freedom) < 4 * math.sqrt(2 * freedom)


def test_rollout_grades_and_scores_each_token_as_a_loop_does():
    """logits[:, t] are those after ids[:, :t+1]; the reward is the grader's."""
    model = coin_model()
    batch = rollout(model, PROBLEMS[:2] * 8, seed=0)
    for row, m, (a, b), correct in zip(batch.ids, batch.mask, batch.problems, batch.correct):
        assert correct == is_correct(a, b, decode(row[1:][m]))
        assert m.nonzero()[0, 0] == len(prompt(a, b)) - 1
    assert 0 < batch.correct.sum() < 16
    assert decode(rollout(model, [(3, 4)]).ids[0]).endswith("</scratch>\n0\n")
    steps = batch.mask[1].nonzero().flatten()[::10].tolist()
    with torch.no_grad():
        slow = [model(batch.ids[1:2, :t + 1])[0][0, -1].log_softmax(-1)[batch.ids[1, t + 1]]
                for t in steps]
    close(token_logp(batch.logits, batch.ids[:, 1:])[1, steps], slow, 1e-4)
    again = rollout(model, PROBLEMS[:2] * 8, seed=0)
    assert torch.equal(again.ids, batch.ids)
    assert not torch.equal(rollout(model, PROBLEMS[:2] * 8, seed=1).correct, batch.correct)


def test_score_in_pieces_is_the_full_pass():
    model, ids = random_model(), random_ids(35, 9)
    with torch.no_grad():
        close(critkl.score(model, ids), model(ids[:, :-1])[0])


# --------------------------------------------------------------------------------------------------
# Masked statistics.

@pytest.mark.parametrize("garbage", [7.0, NAN, INF, -INF])
def test_statistics_do_not_see_the_padding(garbage):
    """[1, 3] whitens to [-1, 1] (population deviation); no value, one, and constants are finite."""
    x = torch.tensor([[1.0, 3.0, garbage, garbage]], requires_grad=True)
    mask = torch.tensor([[True, True, False, False]])
    close(masked_mean(x, mask), 2.0)
    close(torch.autograd.grad(masked_mean(x, mask), x)[0], [[0.5, 0.5, 0, 0]])
    close(whiten(x.detach(), mask), [[-1, 1, 0, 0]])
    one, none = torch.tensor([[False, True, False, False]]), torch.zeros(1, 4).bool()
    close((masked_mean(x.detach(), one), masked_mean(x.detach(), none)), (3.0, 0.0))
    constant = torch.full((1, 4), 5.0)
    for y in (whiten(x.detach(), one), whiten(x.detach(), none), whiten(constant, ~none)):
        close(y, [[0.0] * 4])


# --------------------------------------------------------------------------------------------------
# Penalties.

@pytest.mark.parametrize("kind, by_hand", [("negentropy", 0.32161), ("max_prob", 0.74271)])
def test_certainty(kind, by_hand):
    """(log 4 - 0.94045) / log 4 and 1 + log 0.7 / log 4; 0 for uniform, 1 for one-hot."""
    close(certainty(logits_of([0.7, 0.1, 0.1, 0.1], [0.5, 0.5, 0, 0]), kind), [by_hand, 0.5], 1e-4)
    rows = torch.tensor([[0.0, 0, 0], [0, 1e4, 0], [-INF, 3, -INF]])
    close(certainty(rows, kind), [0.0, 1.0, 1.0])
    scales = torch.logspace(-6, 4, 999)[:, None]
    many = certainty(torch.randn(999, 41, generator=generator()) * scales, kind)
    assert many.min() >= 0 and many.max() <= 1
    with pytest.raises(UserError, match="certainty entropie"):
        certainty(torch.zeros(3), "entropie")


@pytest.mark.parametrize("row", [
    [0.0] * 4, [0, 1e4, 0, -1e4], [2.0, 1, 0, -1], [0.0, 0, -INF, -INF]], ids=str)
@pytest.mark.parametrize("f", [entropy, certainty, functools.partial(certainty, kind="max_prob")])
def test_gradients_of_entropy_and_certainty_are_finite(f, row):
    logits = torch.tensor(row, requires_grad=True)
    assert torch.autograd.grad(f(logits), logits)[0].isfinite().all()


def test_entropy_in_nats_and_kl_weight():
    close(entropy(logits_of(0.5, 0.25, 0.25)), 1.039721)
    close(kl_weight(torch.tensor([0.0, 0.5, 1.0]), 3.0), [0, 0.125, 1])
    close(kl_weight(torch.tensor([0.0, 0.5, 1.0]), 0.0), [1, 1, 1])


def test_kl_estimates_value_and_gradient_by_enumeration():
    """pi = [.5, .5], ref = [.9, .1]: KL .5108, gradient [-.5493, .5493]; k1 none, k3 another."""
    logits, reference = torch.zeros(2, requires_grad=True), logits_of(0.9, 0.1)
    logp = logits.log_softmax(-1)
    for kind, value, slope in (("k1", 0.5108, 0.0), ("k2", 0.7339, 0.5493), ("k3", 0.5108, 0.4)):
        expectation = (logp.detach().exp() * kl_estimate(logp, reference, kind)).sum()
        close(expectation, value, 1e-4)
        found = torch.autograd.grad(expectation, logits, retain_graph=True)[0]
        close(found, [-slope, slope], 1e-4)
    close(kl_exact(logits, reference), 0.5108, 1e-4)
    found = torch.autograd.grad(kl_exact(logits, reference), logits)[0]
    close(found, [-0.5493, 0.5493], 1e-4)
    far = kl_estimate(torch.tensor(-200.0), torch.tensor(0.0), "k3")
    close(far, math.expm1(20) - 200)                                 # D7
    lost = torch.tensor([-200.0, 200.0], requires_grad=True)         # r = e^-200 and e^200
    kl_estimate(lost, torch.zeros(2), "k3").sum().backward()
    close(lost.grad, [1 - math.exp(20), 1 - math.exp(-20)])          # pushes pi back up, not down
    with pytest.raises(UserError, match="k4"):
        kl_estimate(logp, reference, "k4")


def test_kl_of_tiny_and_of_zero_probabilities():
    old = torch.tensor([-84.742, -7.2213, -0.00073, -51.313, -103.49])
    new = torch.tensor([-86.197, -5.939, -0.00264, -53.358, -105.7])
    close(kl_exact(old, new), 9.68e-4, 2e-6)
    close(divergence(old, new, torch.tensor(2), "kl"), 9.68e-4, 2e-6)
    close(kl_exact(logits_of(1.0, 0.0), logits_of([0.5, 0.5], [1.0, 0.0])), [math.log(2), 0.0])
    assert kl_exact(logits_of(0.5, 0.5), logits_of(1.0, 0.0)) == INF


def test_kl_of_nearly_equal_policies_is_small_and_not_negative():
    """mu = .689645578, pi = .689595639: 5.8e-9 by p d^2 / 2 of both events."""
    mu, pi = 0.689645578, 0.689595639
    expected = sum(p * math.log(q / p) ** 2 / 2 for p, q in ((mu, pi), (1 - mu, 1 - pi)))
    assert 5.7e-9 < expected < 5.9e-9
    logits = [torch.tensor([p, 1 - p], dtype=torch.float64).log().float() for p in (mu, pi)]
    found = [divergence(*logits, torch.tensor(0), kind, 1) for kind in KINDS if kind.endswith("kl")]
    close(torch.stack([*found, kl_exact(*logits)]) / expected, [1.0] * 4, 0.02)
    base = torch.randn(2000, 41, generator=generator()) * 4
    near = base + torch.randn(2000, 41) * torch.logspace(-9, -3, 2000)[:, None]
    actions = base.argmax(-1)
    for kind in ("binary_kl", "topk_kl", "kl"):
        assert (divergence(base, near, actions, kind) >= -1e-12).all(), kind
    assert (kl_exact(base, near) >= -1e-12).all()


@pytest.mark.parametrize("row", [[0.0, 0, -INF], [-300.0, 0, 5], [0.0, 1e4, -1e4], [1.0, 1, 1]])
@pytest.mark.parametrize("reference", [[0.0, 0, 0], [0.0, -200, 3], [1.0, 1, 1]])
def test_the_gradient_of_exact_kl(row, reference):
    """By the logits p_i (log(p_i / q_i) - KL); finite also where pi has zeros."""
    logits, other = torch.tensor(row, requires_grad=True), torch.tensor(reference)
    found = torch.autograd.grad(kl_exact(logits, other), logits)[0]
    p, q = (x.detach().double().softmax(-1) for x in (logits, other))
    log_ratio = torch.where(p > 0, p.log() - other.double().log_softmax(-1), 0)
    close(found, p * (log_ratio - (p * log_ratio).sum()), 1e-5)


# --------------------------------------------------------------------------------------------------
# Trust region.

@pytest.mark.parametrize("mu, pi, expected", [
    (1, 0.5, 0.6931), (1, 1, 0), (0.9, 0.5, 0.3681), (0.5, 0.9, 0.5108), (0, 0.05, 0.0513),
    (0.5, 1, INF), (0.5, 1 - 1e-9, 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-9))])
def test_binary_divergences(mu, pi, expected):
    """1 - 1e-9 is 1 in float32, but its tail is known from the logits."""
    logits = [torch.tensor([p, 1 - p], dtype=torch.float64).log().float() for p in (mu, pi)]
    found = divergence(*logits, torch.tensor(0), "binary_kl")
    assert math.isclose(found, expected, abs_tol=1e-4)
    close(divergence(*logits, torch.tensor(0), "binary_tv"), abs(mu - pi))


KL4 = sum(m * math.log(m / p) for m, p in ((0.5, 0.4), (0.3, 0.35), (0.15, 0.05), (0.05, 0.2)))
THREE_SETS = sum(m * math.log(m / p) for m, p in ((0.5, 0.4), (0.05, 0.2), (0.45, 0.4)))


@pytest.mark.parametrize("kind, top_k, expected", [
    ("topk_tv", 2, 0.2), ("topk_kl", 2, 0.1608), ("binary_tv", 2, 0.15), ("binary_kl", 2, 0.0939),
    ("topk_kl", 4, KL4), ("topk_tv", 4, 0.2), ("topk_kl", 99, KL4), ("tv", 1, 0.2), ("kl", 1, KL4),
    ("topk_tv", 1, 0.15), ("topk_kl", 1, THREE_SETS)])
def test_divergences_of_one_token(kind, top_k, expected):
    """Token 3, sampled, joins the top K of mu; the rest is one bucket (K = 1: {0}, {3}, {1, 2})."""
    mu, pi = logits_of(0.5, 0.3, 0.15, 0.05), logits_of(0.4, 0.35, 0.05, 0.2)
    close(divergence(mu, pi, torch.tensor(3), kind, top_k), expected, 1e-4)


def slow_top_k(mu, pi, action, K):
    """TV and KL over the top K of mu, the action, and the rest as one; p, q: lists of numbers."""
    order = sorted(range(len(mu)), key=lambda j: -mu[j])
    named = set(order[:K]) | {action}
    cells = [[j] for j in named] + [[j for j in order if j not in named]]
    P, Q = ([sum(x[j] for j in cell) for cell in cells] for x in (mu, pi))
    kl = sum(x * math.log(x / y) for x, y in zip(P, Q) if x > 0)
    return sum(abs(x - y) for x, y in zip(P, Q)) / 2, kl


def test_k_is_20_by_default():
    mu = torch.arange(41, 0, -1).float()
    pi = torch.where(torch.arange(41) % 2 == 0, mu * 1.5, mu * 0.7)
    p, q = ((x / x.sum()).tolist() for x in (mu, pi))
    by_hand = {K: slow_top_k(p, q, 0, K) for K in (19, 20, 21)}
    assert len({f"{x:.4f}" for x in (by_hand[K][1] for K in by_hand)}) == 3
    found = [divergence(mu.log(), pi.log(), torch.tensor(0), kind)
             for kind in ("topk_tv", "topk_kl")]
    close(torch.stack(found), by_hand[20], 1e-5)


def test_divergences_against_each_other_on_random_pairs():
    """Binary <= top-K <= full, for TV and KL; top-K with K = V (or more) is full; D(mu, mu) = 0."""
    g = generator()
    mu = torch.randn(3000, 9, generator=g) * torch.rand(3000, 1, generator=g) * 6
    pi = mu + torch.randn(3000, 9, generator=g) * torch.rand(3000, 1, generator=g) * 3
    actions = torch.randint(9, (3000,), generator=g)
    D = {kind: divergence(mu, pi, actions, kind, 3) for kind in KINDS}
    for measure in ("tv", "kl"):
        binary, top, full = D["binary_" + measure], D["topk_" + measure], D[measure]
        assert (binary <= top + 1e-5).all() and (top <= full + 1e-5).all()
        assert (binary > -1e-6).all()
        assert (top > binary + 1e-3).any() and (full > top + 1e-3).any()
        for top_k in (9, 1000):
            close(divergence(mu, pi, actions, "topk_" + measure, top_k), full)
        close(divergence(mu, mu, actions, "topk_" + measure, 3), torch.zeros(3000))
    p, q = mu.double().softmax(-1), pi.double().softmax(-1)
    for i in range(50):
        tv, kl = slow_top_k(p[i].tolist(), q[i].tolist(), int(actions[i]), 3)
        close(D["topk_tv"][i], tv)
        close(D["topk_kl"][i], kl, 1e-4)
    close(D["tv"], (p - q).abs().sum(-1) / 2)
    close(D["kl"], (p * (p / q).log()).sum(-1), 1e-4)
    with pytest.raises(UserError, match="binary_js"):
        divergence(mu, pi, actions, "binary_js")


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_of_extreme_probabilities_are_never_nan(kind):
    rows = torch.tensor([[0.0, 0, 0], [0, 1e4, 0], [-INF, 0, -INF], [0, -INF, 0],
                         [-200, 0, -300], [0, -200.0, 0]])
    for mu, pi, action in itertools.product(rows, rows, range(3)):
        assert divergence(mu, pi, torch.tensor(action), kind, 1) > -1e-6  # false for nan


def test_mask_drops_only_moves_away_beyond_delta():
    """All quadrants, below, at and beyond delta; D = delta is kept, moves back, A = 0, r = 1."""
    for A, ratio, D in itertools.product(
            (-2.0, 0.0, 2.0), (0.01, 1.0, 100.0), (0.0, 0.25, 0.2500001, 1.0, INF)):
        dropped = D > 0.25 and ((A > 0 and ratio > 1) or (A < 0 and ratio < 1))
        tensors = (torch.tensor(x) for x in (ratio, A, D))
        assert trust_region_mask(*tensors, 0.25).item() == (not dropped)


# --------------------------------------------------------------------------------------------------
# [Q] section 3 as facts, by enumeration of all sequences of V = 3 tokens and T = 3 steps, float64.

def all_sequences(V=3, T=3):
    return torch.tensor(list(itertools.product(range(V), repeat=T)))


def tabular_policy(seed, sharp):
    """log p(token | prefix) of a random policy: one (V^t, V) table for each step t."""
    rng = torch.Generator().manual_seed(seed)
    return [(sharp * torch.randn(3 ** t, 3, generator=rng, dtype=torch.float64)).log_softmax(-1)
            for t in range(3)]


def along(tables, sequences):
    """The rows of the tables that the sequences pass, (27, T, V)."""
    prefix, rows = torch.zeros(len(sequences), dtype=torch.long), []
    for t, table in enumerate(tables):
        rows.append(table[prefix])
        prefix = 3 * prefix + sequences[:, t]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("seed", range(40))
def test_theorems_3_1_and_3_2(seed):
    """J(pi) - J(mu) = L' - Delta (Eq. 5, 6), and neither lower bound (Eq. 7, 8) is above it."""
    y, sharp = all_sequences(), (0.3, 1.0, 4.0)[seed % 3]
    mu, pi = (along(tabular_policy(2 * seed + i, sharp), y) for i in (0, 1))
    R = torch.randn(27, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_mu, log_pi = (x.gather(-1, y[..., None])[..., 0] for x in (mu, pi))
    p_mu, p_pi, r = log_mu.sum(1).exp(), log_pi.sum(1).exp(), (log_pi - log_mu).exp()
    gain = (p_pi * R).sum() - (p_mu * R).sum()
    surrogate = (p_mu * R * (r - 1).sum(1)).sum()
    later = torch.stack([r[:, t + 1:].prod(1) for t in range(3)], 1)
    close(gain, surrogate - (p_mu * R * ((r - 1) * (1 - later)).sum(1)).sum(), 1e-12)
    tv, xi = (mu.exp() - pi.exp()).abs().sum(-1) / 2, R.abs().max()
    assert gain >= surrogate - 2 * xi * 3 * 2 * tv.max() ** 2 - 1e-12
    assert gain >= surrogate - 4 * xi * (p_mu * tv.sum(1)).sum() - 1e-12
    close(tv, (mu.exp() * ((pi - mu).exp() - 1).abs()).sum(-1) / 2, 1e-12)  # Eq. 11
    close(divergence(mu, pi, y, "tv"), tv, 1e-6)


def test_worked_example_of_section_4_2():
    """The ratio is 100 where 0.0099 of the mass moves, and 0.808 where 0.19 does."""
    for mu, pi, ratio, moved in ((1e-4, 1e-2, 100, 0.0099), (0.99, 0.80, 0.808, 0.19)):
        close(pi / mu, ratio, 1e-3)
        logits = logits_of(mu, 1 - mu), logits_of(pi, 1 - pi)
        close(divergence(*logits, torch.tensor(0), "binary_tv"), moved, 1e-5)


# --------------------------------------------------------------------------------------------------
# Advantages and losses.

@pytest.mark.parametrize("gamma, lam", [
    (1.0, 1.0), (0.9, 1.0), (1.0, 0.8), (0.9, 0.7), (0.5, 0.0), (0.0, 0.5)])
def test_gae_against_its_definition(gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_(t+l), on one run of True per row, garbage around it.
    A cut-off counts as an end: r = 1, V = .5 and V' = 2 beyond it give .5, not 2.3."""
    x = torch.tensor([[1.0, 0]]), torch.tensor([[0.5, 2]]), torch.tensor([[True, False]])
    close(gae(*x, 0.9, 1.0)[0], [[0.5, 0]])
    rng, (rewards, values) = random.Random(0), torch.randn(2, 20, 9, generator=generator())
    mask = torch.zeros(20, 9, dtype=torch.bool)
    for row in mask[1:]:                                             # the first row stays empty
        begin = rng.randrange(9)
        row[begin:rng.randint(begin + 1, 9)] = True
    rewards[~mask], values[~mask] = NAN, INF
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for i, t in itertools.product(range(20), range(9)):
        run = mask[i].nonzero().flatten().tolist()
        r, V = (dict(zip(run, x[i, run].tolist())) for x in (rewards, values))
        delta = {u: r[u] + gamma * V.get(u + 1, 0.0) - V[u] for u in run}
        later = [u for u in run if u >= t] if t in run else []
        expected = sum((gamma * lam) ** (u - t) * delta[u] for u in later)
        close((advantages[i, t], returns[i, t]), (expected, expected + V.get(t, 0.0)))


def one_token(ratio, A, **more):
    """Value and gradient by logp of the objective, and info, for one token with mu = 0.3."""
    logp_mu = torch.tensor([[0.3]], dtype=torch.float64).log()
    logp = (logp_mu + math.log(ratio)).requires_grad_()
    advantages, mask = torch.tensor([[A]], dtype=torch.float64), torch.tensor([[True]])
    loss, info = policy_loss(logp, logp_mu, advantages, mask, **more)
    return -loss.item(), -torch.autograd.grad(loss, logp)[0].item(), info


@pytest.mark.parametrize("A", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.7, 1.0, 1.3, 2.0, 3.0])
def test_clip_in_all_quadrants(A, ratio):
    """PPO's min(r A, clip(r) A), inside, at and beyond the bounds .5 and 2."""
    value, slope, info = one_token(ratio, A, eps_low=0.5, eps_high=1.0)
    close(value, min(ratio * A, min(max(ratio, 0.5), 2.0) * A))
    high, low = A > 0 and ratio > 2, A < 0 and ratio < 0.5
    close(slope, 0.0 if high or low else ratio * A)
    shares = (info["masked"], info["masked_positive"], info["masked_negative"])
    assert shares == (high or low, high, low)


@pytest.mark.parametrize("A", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("D", [0.0, 0.25, 0.3])
def test_divergence_mask_in_all_quadrants(A, ratio, D):
    """The mask carries no gradient: a kept token has r A, a dropped one 0 (value and gradient)."""
    value, slope, info = one_token(
        ratio, A, trust_region="divergence", D=torch.tensor([[D]]), delta=0.25)
    dropped = D > 0.25 and (ratio - 1) * A > 0
    close((value, slope), [0.0 if dropped else ratio * A] * 2)
    assert info["masked"] == dropped


UNBOUNDED = dict(
    none=dict(trust_region="none"), clip=dict(eps_low=1.0, eps_high=INF),
    divergence=dict(trust_region="divergence", D=torch.tensor([[9.0]]), delta=INF))


@pytest.mark.parametrize("cap", [0.5, 1.0, 3.0, INF])
@pytest.mark.parametrize("region", UNBOUNDED)
def test_infinite_bounds_and_a_cap(region, cap):
    """No bounds give the unclipped objective, whose gradient is min(r, C) A grad log pi, Eq. 23."""
    for ratio, A in itertools.product((0.1, 1.0, 2.0, 10.0), (-1.5, 1.5)):
        found = one_token(ratio, A, ratio_cap=cap, **UNBOUNDED[region])
        expected = min(ratio, cap) * A
        close((*found[:2], found[2]["masked"]), (expected, expected, 0.0))


def test_negative_mask_and_anchor():
    """"negative" drops A < 0 with anchor - pi >= delta; the mask looks at the anchor, the weight at
    mu."""
    far = dict(trust_region="divergence", D=torch.tensor([[1.0]]))
    for ratio, A, anchor in itertools.product(
            (0.2, 0.5, 1.0, 3.0), (-2.0, 2.0), (0.05, 0.29, 0.85)):
        pi = 0.3 * ratio
        logp_anchor = torch.tensor([[anchor]], dtype=torch.float64).log()
        r = pi / anchor
        for more, dropped in (
                (dict(trust_region="negative", delta=0.4), A < 0 and anchor - pi >= 0.4),
                ({}, A > 0 and r > 1.2 or A < 0 and r < 0.8),
                (far, (pi - anchor) * A > 0)):
            _, slope, info = one_token(ratio, A, logp_anchor=logp_anchor, **more)
            close(slope, 0.0 if dropped else ratio * A)
            assert info["masked"] == dropped


@pytest.mark.parametrize("cap", [0.5, 1.0, 3.0, 1e3, INF])
@pytest.mark.parametrize("A", [-0.441, 0.441])
@pytest.mark.parametrize("mu, pi", [(3.93e-13, 0.0187), (0.0187, 3.93e-13), (0.3, 0.0187)])
def test_the_cut_of_the_ratio_bounds_the_weight_and_not_the_gradient(mu, pi, A, cap):
    """Eq. 23 by the logits: min(r, C) A (onehot - pi), with |log r| <= 20 (D7) in r; such a token
    is counted. mu = 3.93e-13, pi = .0187, A = -.441, C = 1: -.441 (1 - .0187) = -.4328."""
    logits = torch.tensor([pi, 1 - pi], dtype=torch.float64).log().requires_grad_()
    logp = logits.log_softmax(-1)[None, :1]
    logp_mu = torch.tensor([[mu]], dtype=torch.float64).log()
    advantages, mask = torch.tensor([[A]], dtype=torch.float64), torch.ones(1, 1).bool()
    loss, info = policy_loss(logp, logp_mu, advantages, mask, trust_region="none", ratio_cap=cap)
    ratio = min(max(pi / mu, math.exp(-20)), math.exp(20), cap)
    slope = ratio * A * (1 - pi)
    close(-torch.autograd.grad(loss, logits)[0] / slope, [1.0, -1.0])
    assert info["masked"] == 0 and info["cut"] == (abs(math.log(pi / mu)) > 20)


@pytest.mark.parametrize("garbage", [None, 0.5, NAN, INF, -INF])
def test_policy_loss_by_hand_with_garbage_in_the_padding(garbage):
    """mu = .5, pi = .75 (clipped) and mu = .4, pi = .1 (kept), A = 1: value, gradient, infos."""
    def pad(x):
        return x if garbage is None else torch.cat((x, torch.full((1, 2), garbage)), 1)

    mask = torch.tensor([[True, True] + [False] * (0 if garbage is None else 2)])
    logp, A = pad(logits_of(0.75, 0.1)[None]).requires_grad_(), pad(torch.ones(1, 2))
    loss, info = policy_loss(logp, pad(logits_of(0.5, 0.4)[None]), A, mask, D=A)
    close(loss, -(1.2 + 0.25) / 2)
    close(torch.autograd.grad(loss, logp)[0], [[0, -0.125, 0, 0][:mask.shape[1]]])
    expected = dict(
        masked=0.5, masked_positive=0.5, masked_negative=0, bad=0, cut=0, ratio_max=1.5,
        ratio_min=0.25, drift=-0.025, drift_max=0.25, drift_min=-0.3,
        kl_mu=(0.5 - math.log(1.5) - 0.75 - math.log(0.25)) / 2)
    assert info.keys() == expected.keys()
    close([info[name] for name in expected], list(expected.values()))


def test_bad_tokens_are_those_with_a_drift_of_minus_a_half():
    """A < 0 and mu - pi >= .5: exactly .5 counts, a little less does not, nor does A > 0."""
    mu = torch.tensor([[0.0] * 4])
    pi = logits_of([0.5, 0.5001, 0.4, 0.4])
    assert pi[0, 0].exp() - 1 == -0.5
    A = torch.tensor([[-1.0, -1.0, -1.0, 1.0]])
    _, info = policy_loss(pi, mu, A, torch.ones(1, 4).bool())
    assert info["bad"] == 0.5


def test_a_token_at_the_bound_of_the_clip_is_kept():
    for eps, ratio, A in ((0.5, 0.5, -1.0), (1.0, 2.0, 1.0)):
        assert one_token(ratio, A, eps_low=eps, eps_high=eps)[2]["masked"] == 0


@pytest.mark.parametrize("region", ["clip", "divergence", "negative", "none"])
def test_losses_of_nothing_and_of_extremes_are_finite(region):
    """An empty mask gives 0, log-ratios of +-200 are finite; a wrong call is refused."""
    logp = torch.tensor([[-200.0, -0.1] * 2], requires_grad=True)
    mu, A = logp.detach().flip(1), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    for mask in (torch.ones(1, 4).bool(), torch.zeros(1, 4).bool()):
        loss, info = policy_loss(logp, mu, A, mask, trust_region=region, D=mu + INF, ratio_cap=5.0)
        assert loss.isfinite() and torch.autograd.grad(loss, logp)[0].isfinite().all()
        assert all(x.isfinite() and not x.requires_grad and x.ndim == 0 for x in info.values())
        assert info["cut"] == mask.any()
    assert loss == 0 and info["ratio_max"] == info["ratio_min"] == 1
    for wrong in ("cliff", "divergence"):
        with pytest.raises(UserError, match=wrong):
            policy_loss(logp, mu, A, mask, trust_region=wrong)


@pytest.mark.parametrize("relax, low, high", [
    ("none", [0.3] * 3, [0.4] * 3), ("low", [1, 0.3, 0.3], [0.4] * 3),
    ("high", [0.3] * 3, [INF, 0.4, 0.4]), ("both", [1, 0.3, 0.3], [INF, 0.4, 0.4])])
def test_only_the_ends_asked_for_are_relaxed_and_only_below(relax, low, high):
    """Tokens with mu below .1, not at it: .05, .1 and .5."""
    cfg = config(relax=relax, eps_low=0.3, eps_high=0.4, relax_below=0.5)
    logp_mu = logits_of([0.05, 0.5, 0.9])
    batch = Batch(*[None] * 3, logp_mu, *[None] * 3)
    given = critkl.trust_region_inputs(None, batch, cfg)
    assert given["eps_low"].tolist() == [pytest.approx(low)]
    assert given["eps_high"].tolist() == [pytest.approx(high)]


# --------------------------------------------------------------------------------------------------
# The loop.

FIRST = [dict(mode="standard"), dict(mode="critical")] + [
    dict(mode="dppo", divergence=kind) for kind in KINDS]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("given", FIRST, ids=str)
def test_first_minibatch_has_ratio_one(given, temperature):
    """Before the first step the policy is mu and the reference: ratio 1, KL 0, nothing dropped."""
    policy, cfg = random_model(), config(delta=1e-4, temperature=temperature, **given)
    policy.temperature = temperature
    _, info = ppo_loss(policy, prepared(cfg, policy, copy.deepcopy(policy)), cfg)
    assert max(info["ratio_max"] - 1, 1 - info["ratio_min"]) < 1e-5
    assert info["masked"] == 0 and abs(info["kl_mu"]) < 1e-6
    assert abs(info.get("kl_ref", 0)) < 1e-6


def test_prepare():
    """The reward is the last token's; advantages are whitened or, in groups, centred; J^beta."""
    policy, reference = random_model(), random_model(1)
    cfg = config(beta=3.0, certainty="max_prob", certainty_temperature=4.0)
    batch = prepared(cfg, policy, reference)
    correct = torch.tensor([0.0, 1, 0, 1])[:, None].expand_as(batch.mask)
    close(batch.returns[batch.mask], correct[batch.mask])            # gamma = lam = 1
    A = batch.advantages[batch.mask]
    close((A.mean(), A.std(unbiased=False)), (0.0, 1.0))
    with torch.no_grad():
        logits = reference(batch.states)[0]
        policy_logits = policy(batch.states)[0]
    close(batch.logits_ref[batch.mask], logits[batch.mask])
    close(batch.logits_anchor[batch.mask], policy_logits[batch.mask], 1e-4)
    close(batch.logp_mu[batch.mask], token_logp(policy_logits, batch.actions)[batch.mask], 1e-4)
    p = (logits / 4).softmax(-1).max(-1).values
    close(batch.kl_weights, (1 + p.log() / math.log(41)) ** 3)
    batch = prepared(config(gamma=0.5), policy, reference)
    end = int(batch.mask[1].nonzero()[-1]) + 1
    close(batch.returns[1, end - 4:end], [0.125, 0.25, 0.5, 1.0])
    batch = prepared(config(advantage="group", group=2), policy, reference)
    centred = torch.tensor([-0.5, 0.5, -0.5, 0.5])[:, None].expand_as(batch.mask)
    close(batch.advantages[batch.mask], centred[batch.mask])
    batch = prepared(config("none"), policy, reference)
    assert batch.logits_ref is None and batch.kl_weights is None
    batch = prepared(config("standard"), policy, reference)
    assert (batch.kl_weights == 1).all()


def test_rows_of_a_batch_without_the_padding_they_share():
    policy, reference = random_model(), random_model(1)
    batch = prepared(config(), policy, reference)
    batch.mask = torch.zeros_like(batch.mask)
    for i, end in enumerate((9, 12, 30, 5)):
        batch.mask[i, 4:end] = True
    part = batch.take([3, 1])
    assert part.mask.sum(1).tolist() == [1, 8] and part.mask.shape[1] == 12
    for field in dataclasses.fields(batch):
        assert torch.equal(getattr(part, field.name), getattr(batch, field.name)[[3, 1], :12])
    assert prepared(config("none"), policy, reference).take([0]).logits_ref is None


A2C = [
    dict(mode="none"), dict(mode="none", trust_region="none"), dict(mode="dppo"),
    dict(mode="standard", kl_kind="k1"), dict(mode="standard"), dict(mode="standard", kl_kind="k3"),
    dict(mode="standard", kl_kind="exact"), dict(mode="critical", beta=2.0),
    dict(mode="critical", beta=2.0, entropy_coef=0.3)]


@pytest.mark.parametrize("given", A2C, ids=str)
def test_one_pass_of_ppo_is_a2c(given):
    """[V]: the gradient is that of -A log pi plus value, KL and entropy terms, written out."""
    cfg, policy, reference = config(alpha=0.7, **given), random_model(), random_model(1)
    batch = prepared(cfg, policy, reference)
    loss, info = ppo_loss(policy, batch, cfg)
    (logits, values), m = policy(batch.states), batch.mask
    log_p = logits.log_softmax(-1)[m]
    log_q = reference(batch.states)[0].detach().log_softmax(-1)[m]
    logp, logq = (x.gather(-1, batch.actions[m][:, None])[:, 0] for x in (log_p, log_q))
    H, H_ref = (-(x.exp() * x).sum(-1) for x in (log_p, log_q))
    kl = dict(
        k1=logp - logq, k2=(logp - logq) ** 2 / 2, k3=(logq - logp).exp() - 1 - (logq - logp),
        exact=(log_p.exp() * (log_p - log_q)).sum(-1))[cfg.kl_kind]
    weight = dict(none=0, standard=1, critical=(1 - H_ref / math.log(41)) ** 2)[cfg.penalty]
    error = (values - batch.returns)[m] ** 2 / 2
    expected = (-batch.advantages[m] * logp + cfg.value_coef * error + 0.7 * weight * kl
                - cfg.entropy_coef * H).mean()
    close(gradient(loss, policy), gradient(expected, policy), 2e-5)
    terms = dict(entropy=H, value_loss=error)
    if cfg.penalty != "none":
        terms |= dict(kl_ref=kl, penalty=weight * kl)
    for name, term in terms.items():
        close(info[name], term.mean(), 1e-4)


AGREE = [
    (dict(mode="critical", beta=0.0), dict(mode="standard")),
    (dict(mode="critical", alpha=0.0), dict(mode="none")),
    (dict(mode="none", eps_low=1.0, eps_high=INF), dict(mode="none", trust_region="none")),
    (dict(mode="none", eps_low=1.0, eps_high=1e6), dict(mode="none", trust_region="none")),
    (dict(mode="dppo", delta=INF), dict(mode="none", trust_region="none")),
    (dict(mode="none", anchor="recomputed"), dict(mode="none", trust_region="none")),
    (dict(mode="dppo", divergence="topk_kl", top_k=41, delta=0.1),
     dict(mode="dppo", divergence="kl", delta=0.1)),
    (dict(mode="none", ratio_cap=0.0), dict(mode="none", ratio_cap=1e6)),
    (dict(mode="none", relax="both", relax_below=1.0), dict(mode="none", trust_region="none"))]


@pytest.mark.parametrize("one, other", AGREE, ids=str)
def test_settings_that_must_agree(one, other):
    """Away from mu: beta 0 is the standard penalty, alpha 0 plain PPO, no bounds none, K = V full;
    a policy recomputed before the first step is the policy itself, so nothing is clipped."""
    policy, mu, reference = random_model(), random_model(2), random_model(1)
    found = []
    for given in (dict(mode="none", eps_low=0.1), one, other):
        cfg = config(**given)
        found.append(loss_and_gradient(cfg, prepared(cfg, policy, reference, mu), policy))
    plain, one, other = found
    close(one, other, 1e-6)
    assert (plain - other).abs().max() > 1e-3                        # the setting does something


@pytest.mark.parametrize("one, other", [
    (dict(mode="none", relax="low"), dict(mode="none", relax="high")),
    (dict(mode="none", relax="none"), dict(mode="none", relax="both")),
    (dict(mode="dppo", divergence="topk_kl", top_k=1), dict(mode="dppo", divergence="topk_kl")),
    (dict(mode="none", ratio_cap=0.0), dict(mode="none", ratio_cap=0.5)),
    (dict(mode="none", method="negative_only"), dict(mode="none", trust_region="none"))], ids=str)
def test_settings_that_must_differ(one, other):
    policy, mu, reference = random_model(), random_model(2), random_model(1)
    found = []
    for given in (one, other):
        cfg = config(**given)
        found.append(loss_and_gradient(cfg, prepared(cfg, policy, reference, mu), policy))
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_a_penalty_with_coefficient_zero_is_not_computed():
    """0 * inf would be nan."""
    cfg, policy = config("standard", alpha=0.0), random_model()
    batch = prepared(cfg, policy, random_model(1))
    batch.logits_ref[..., 1:] = -INF
    assert loss_and_gradient(cfg, batch, policy).isfinite().all()


def test_dropped_tokens_keep_the_kl_term_and_nothing_else():
    """Every token moves away from mu beyond delta = 0: the gradient is that of the KL penalty."""
    cfg = config("standard", trust_region="divergence", delta=0.0, value_coef=0.0)
    policy, mu = random_model(), random_model(2)
    batch = prepared(cfg, policy, random_model(1), mu)
    logp = token_logp(policy(batch.states)[0], batch.actions)
    batch.advantages = (logp - batch.logp_mu).sign().detach()
    loss, info = ppo_loss(policy, batch, cfg)
    log_ratio = logp - token_logp(batch.logits_ref, batch.actions)
    penalty = masked_mean(log_ratio ** 2 / 2, batch.mask)
    assert info["masked"] == 1
    close(gradient(loss, policy), gradient(cfg.alpha * penalty, policy), 1e-6)


@pytest.mark.parametrize("given", [dict(mode="critical", beta=2.0), dict(mode="dppo")], ids=str)
def test_padding_and_company_change_nothing(given):
    """Right padding and garbage in it change no loss, gradient or diagnostic; rows weigh by their
    tokens."""
    cfg, policy = config(**given), random_model()
    batch, changed = prepared(cfg, policy, random_model(1), random_model(2)), {}
    batch.states[0, 60:], batch.mask[0, 59:] = 0, False              # rows of different lengths
    for field in dataclasses.fields(batch):
        x = getattr(batch, field.name)
        if x is None:
            continue
        pad = x[:, :6]
        x = torch.cat((x, pad & False if x.dtype == torch.bool else 0 * pad), 1)
        if x.ndim == 2 and x.is_floating_point():                    # hidden, so it may be anything
            garbage = NAN if field.name in ("logp_mu", "advantages") else 1e3
            x[:, :-6][~batch.mask] = garbage
            x[:, -6:] = garbage
        changed[field.name] = x
    longer = dataclasses.replace(batch, **changed)
    whole = loss_and_gradient(cfg, batch, policy)
    close(loss_and_gradient(cfg, longer, policy), whole, 1e-6)
    infos = [ppo_loss(policy, x, cfg)[1] for x in (longer, batch)]
    close(*(torch.stack(list(info.values())) for info in infos), 1e-6)
    share = batch.mask.sum(1) / batch.mask.sum()
    alone = [loss_and_gradient(cfg, batch.take([i]), policy) * share[i] for i in range(4)]
    close(sum(alone), whole)


def test_update_uses_every_row_and_averages_all_minibatches(monkeypatch):
    """Each epoch uses each row once, in an order of its own; the log holds means over the tokens,
    extremes of _max and _min."""
    cfg, policy = config(minibatch=2, epochs=2), random_model()
    batch = prepared(cfg, policy, random_model(1))
    batch.mask = torch.arange(batch.mask.shape[1]) <= torch.arange(4)[:, None]   # 1 to 4 tokens
    seen, numbers = [], iter(range(1, 9))

    def fake(policy, minibatch, cfg):
        seen.append(minibatch.mask.sum(1).tolist())
        n = torch.tensor(float(next(numbers)))
        loss = sum(p.sum() for p in policy.parameters())
        return loss, dict(policy_loss=n, ratio_max=n, ratio_min=n)

    monkeypatch.setattr(critkl, "ppo_loss", fake)
    optimizer = torch.optim.SGD(policy.parameters(), 0.0)
    info = update(policy, optimizer, batch, cfg, 0)
    assert [sorted(sum(seen[i:i + 2], [])) for i in (0, 2)] == [[1, 2, 3, 4]] * 2
    weighted = sum(n * sum(tokens) for n, tokens in zip((1, 2, 3, 4), seen)) / 20
    close([info[k] for k in ("policy_loss", "ratio_max", "ratio_min")], [weighted, 4, 1])
    close(info["grad_norm"], sum(p.numel() for p in policy.parameters()) ** 0.5)
    orders = [seen[:2], seen[2:]]
    update(policy, optimizer, batch, cfg, 1)
    assert len({str(order) for order in (*orders, seen[4:6], seen[6:])}) > 2


def test_explained_variance():
    """1 less the share that is left: 1 - 0.5 / 1; of constant returns 0; padding does not count."""
    mask = torch.tensor([[True, True, False]] * 2)
    returns = torch.tensor([[1.0, 3.0, 9.0]] * 2)
    values = torch.tensor([[1.0, 2.0, 5.0]] * 2)
    batch = Batch(*[None] * 2, mask, *[None] * 2, returns, None)
    close(critkl.explained_variance(batch, values), 0.5)
    batch.returns = torch.ones(2, 3)
    assert critkl.explained_variance(batch, values) == 0


@pytest.mark.parametrize("mode", ["none", "standard", "critical", "dppo"])
def test_a_minibatch_of_one_and_a_loss_that_is_not_finite(mode):
    """One episode trains; an infinite return stops the update before the step and is named."""
    policy, cfg = random_model(), config(mode, episodes=1, minibatch=1)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    batch = prepared(cfg, policy, random_model(1))
    info = update(policy, optimizer, batch, dataclasses.replace(cfg, epochs=2), 0)
    assert all(map(math.isfinite, info.values())) and info["ratio_max"] > 1
    before = copy.deepcopy(policy.state_dict())
    batch.returns = batch.returns + INF
    with pytest.raises(UserError, match="iteration 7.*value_loss is inf"):
        update(policy, optimizer, batch, cfg, 7)
    assert all(torch.equal(before[name], x) for name, x in policy.state_dict().items())


@pytest.mark.parametrize("limit, expected", [(0.0, 1.0), (0.5, 0.5), (1e3, 1.0)])
def test_gradients_are_clipped_to_the_norm_that_is_asked_for(limit, expected, monkeypatch):
    """The loss 0.6 x + 0.8 y has a gradient of norm 1; SGD with rate 1 goes that far at most."""
    cfg, policy = config(max_grad_norm=limit, epochs=1), random_model()
    batch = prepared(cfg, policy, random_model(1))
    bias = policy.value_head.bias
    start = bias.item()

    def fake(policy, batch, cfg):
        return policy.value_head.bias.sum(), dict(policy_loss=torch.tensor(0.0))

    monkeypatch.setattr(critkl, "ppo_loss", fake)
    info = update(policy, torch.optim.SGD(policy.parameters(), 1.0), batch, cfg, 0)
    close(start - bias.item(), expected, 1e-4)
    close(info["grad_norm"], 1.0)


TOYS = [
    (dict(mode="critical"), 0.6, 1), (dict(mode="standard"), 0.25, 0.55),
    (dict(mode="none"), 0.6, None), (dict(mode="dppo"), 0.6, None),
    (dict(mode="none", trust_region="none", epochs=1, minibatch=16), 0.6, 1)]


@pytest.mark.parametrize("given, low, high", TOYS, ids=str)
def test_rl_improves_a_toy_problem(given, low, high):
    """The claim of [V] in small. The model doubts one token, wrong by 2/3; RL puts it right. At the
    same alpha a strong standard penalty does not let it, the critical one does."""
    cfg = config(**dict(episodes=16, minibatch=8, lr=3e-4, alpha=5.0, epochs=2) | given)
    policy, reference = copy.deepcopy(coin_model()), coin_model()
    optimizer = torch.optim.AdamW(policy.parameters(), cfg.lr, betas=(0.9, 0.99), weight_decay=0.0)

    def success():
        return examine(policy, PROBLEMS[:2], 1)[0].mean().item()

    assert 0.25 < success() < 0.4
    for iteration in range(8):
        sampled = rollout(policy, PROBLEMS[:2] * 8, seed=iteration)
        batch = prepare(sampled, policy, reference, cfg)
        update(policy, optimizer, batch, cfg, iteration)
    if high:
        assert low < success() < high
    else:                                                            # free to change the scratchpad
        assert rollout(policy, PROBLEMS[:2] * 32, seed=99).correct.mean() > low


# --------------------------------------------------------------------------------------------------
# Evaluation.

CRITICAL = [
    (2033, 5179, 3, {
        "line1_first_n+1": "\n[2,0,3|,3]", "line1_second_n+1": " + [5,1,7|,9]",
        "line2_first_n+1": "\n[2,0|,3]", "line2_second_n+1": " + [5,1|,7]",
        "line3_first_n+1": "\n[2|,0]", "line3_second_n+1": " + [5|,1]"}),
    (78, 12345, 3, {
        "line1_second_n+1": " + [1,2,3|,4,5]", "line1_second_n+2": " + [1,2,3,4|,5]",
        "line2_second_n+1": " + [1,2|,3,4]", "line2_second_n+2": " + [1,2,3|,4]",
        "line3_second_n+1": " + [1|,2,3]", "line3_second_n+2": " + [1,2|,3]"}),
    (345, 5, 1, {
        "line1_first_n+1": "\n[3|,4,5]", "line1_first_n+2": "\n[3,4|,5]",
        "line2_first_n+2": "\n[3|,4]"}),
    (345, 5, 2, {"line1_first_n+1": "\n[3,4|,5]", "line2_first_n+1": "\n[3|,4]"}),
    (34, 5, 1, {"line1_first_n+1": "\n[3|,4]"}), (128, 367, 3, {})]


@pytest.mark.parametrize("a, b, digits, expected", CRITICAL)
def test_critical_tokens_by_hand(a, b, digits, expected):
    """Written as "list up to the token|list from its comma on"; each list is in the text once."""
    text, places = scratchpad(a, b), {}
    for name, part in expected.items():
        place = text.index(part.replace("|", "")) + part.index("|")
        places |= {f"{name}_comma": place, f"{name}_digit": place + 1}
    assert critical_tokens(a, b, digits) == places


def test_examine_is_the_product_of_token_probabilities():
    """By a loop over one problem at a time, averaged by name where critical; sampling agrees."""
    model, problems, names = coin_model(), [(3, 4), (7, 8), (34, 5), (16, 5)], {}
    expected, critical = examine(model, problems, 1)
    for i, p in enumerate(problems):
        ids, begin = torch.tensor([encode(prompt(*p) + scratchpad(*p))]), len(prompt(*p))
        with torch.no_grad():
            logp = token_logp(model(ids)[0][:, :-1], ids[:, 1:])[0]
        close(expected[i], logp[begin - 1:].sum().exp())
        for name, k in critical_tokens(*p, 1).items():
            names[name] = names.get(name, 0) + logp[begin - 1 + k].exp().item() / 2
    assert critical.keys() == names.keys() == {"line1_first_n+1_comma", "line1_first_n+1_digit"}
    close([critical[name] for name in names], list(names.values()))
    close(expected[:2], [1 / 3] * 2, 0.05)
    assert abs(rollout(model, problems[:2] * 100, seed=0).correct.mean() - 1 / 3) < 0.1


def test_many_problems_are_examined_in_pieces(monkeypatch):
    """Of a few hundred rows at a time, with the same numbers."""
    model, rows = coin_model(), []
    whole = critkl.score

    def counting(model, ids):
        rows.append(len(ids))
        return whole(model, ids)

    few, critical_of_few = examine(model, [(3, 4), (34, 5)], 1)
    monkeypatch.setattr(critkl, "score", counting)
    expected, critical = examine(model, [(3, 4)] * 3 + [(34, 5)] * 300, 1)
    assert sum(rows) == 303 and max(rows) <= 256
    close(expected, torch.cat((few[:1].expand(3), few[1:].expand(300))))
    close(list(critical.values()), [critical_of_few[name] for name in critical])


@pytest.mark.parametrize("heads", [1, 2])
def test_forced_tokens_against_a_loop(heads):
    """The likeliest wrong character, then greedy decoding one token at a time."""
    model, problems = coin_model(heads), PROBLEMS[:2]
    places = [(i, t) for i in (1, 0) for t in (1, 61, len(scratchpad(*problems[i])) - 2)]
    wrong, right = critkl.force(model, problems, places)
    again, all_right = critkl.force(model, problems, places * 17)    # more than at a time
    assert again == wrong * 17 and torch.equal(all_right, right.repeat(17))
    for (i, t), character, correct in zip(places, wrong, right):
        begin, true = prompt(*problems[i]), scratchpad(*problems[i])
        with torch.no_grad():
            logits = model(torch.tensor([encode(begin + true[:t])]))[0][0, -1]
        logits[critkl.TOKEN_ID[true[t]]] = -INF
        assert critkl.TOKEN_ID[character] == logits.argmax()
        start = encode(begin + true[:t] + character)
        text = decode(decode_slowly(model, start, 120, text=true[:t] + character))
        assert correct == is_correct(*problems[i], text[len(begin):])
    assert right.any() == (heads == 2) and not right.all()
    control, _ = critkl.force(model, problems, places, wrong=False)
    assert control == [scratchpad(*problems[i])[t] for i, t in places]
    assert critkl.force(model, problems, [])[0] == []


def test_evidence_for_critical_tokens_against_a_loop():
    model, problems, cfg, threshold = random_model(), [(34, 5), (16, 25)], config(), 0.4
    gap, counts = critkl.critical_evidence(model, problems, cfg, threshold)
    listed, uncertain, gaps, others = [], [], [], []
    for i, p in enumerate(problems):
        ids = torch.tensor([encode(prompt(*p) + scratchpad(*p))])
        with torch.no_grad():
            J = certainty(model(ids)[0][0, len(prompt(*p)) - 1:-1])
        less = [J[t] - torch.cat((J[:t], J[t + 1:])).mean() for t in range(len(J))]
        own = list(critical_tokens(*p, 1).values())
        listed += [(i, t) for t in own]
        uncertain += [(i, t) for t in range(len(J)) if J[t] < threshold and (J < J[t]).sum() < 10]
        gaps.append(sum(less[t] for t in own) / len(own))
        others.append(sum(less[t] for t in range(len(J)) if t not in own) / (len(J) - len(own)))
    both = [place for place in listed if place in uncertain]
    names = ("listed", "uncertain", "listed and uncertain")
    assert [counts[name] for name in names] == [len(x) for x in (listed, uncertain, both)]
    assert len(listed) == 6 and 10 <= len(uncertain) <= 20
    close((gap["critical"][0], gap["non-critical"][0]), (sum(gaps) / 2, sum(others) / 2))
    assert counts["listed and decisive"] == counts["uncertain and decisive"] == 0   # never right
    assert counts["all three"] == 0


def test_the_last_digit_is_decisive():
    """After the true digit the greedy answer is right, after the likeliest wrong one it is not."""
    model, problems = coin_model(2), PROBLEMS[:2]
    places = [(i, len(scratchpad(*p)) - 2) for i, p in enumerate(problems)]
    put, right = critkl.force(model, problems, places, wrong=False)
    assert right.all() and put == [scratchpad(*p)[-2] for p in problems]
    put, right = critkl.force(model, problems, places)
    assert not right.any() and put[0] == "0"                         # what it says instead
    counts = critkl.critical_evidence(model, problems, config(), 0.9)[1]
    assert counts["uncertain"] >= counts["uncertain and decisive"] >= 2 and counts["listed"] == 0


def test_problems_that_are_solved_sometimes(monkeypatch):
    """All different, of the training part; too few of them is an error, not an endless search."""
    seen = []

    def examined(model, problems, digits):
        seen.extend(problems)
        return torch.tensor([a % 2 / 2 for a, b in problems]), {}

    monkeypatch.setattr(critkl, "examine", examined)
    chosen = critkl.fixed_problems(types.SimpleNamespace(), config(fixed=20))
    assert len(set(chosen)) == len(chosen) == 20
    assert all(a % 2 and not held_out(a, b) for a, b in chosen)
    seen.clear()
    with pytest.raises(UserError, match="--fixed 10000"):
        critkl.fixed_problems(types.SimpleNamespace(), config(fixed=10000))
    assert len(seen) == 10000 and critkl.fixed_problems(None, config()) == []


def test_certainty_is_taken_at_its_own_temperature():
    raw = torch.randn(2, 3, 41, generator=generator())
    for temperature, asked, expected in ((1.0, 0.0, 1.0), (2.0, 0.0, 2.0), (2.0, 4.0, 4.0),
                                         (1.0, 4.0, 4.0)):
        cfg = config(temperature=temperature, certainty_temperature=asked, certainty="max_prob")
        found = critkl.reference_certainty(raw / temperature, cfg)
        close(found, certainty(raw / expected, "max_prob"))


def test_interval():
    """1.96 sqrt(p (1-p) / n) of .25 and 1,000; Wilson's where all are wrong or all right:
    1.96^2 / (n + 1.96^2)."""
    mean, low, high = interval((torch.arange(1000) % 4 == 0).float())
    assert mean == 0.25 and abs(low - 0.2232) < 0.002 and abs(high - 0.2768) < 0.002
    for n, width in ((20, 0.161), (100, 0.037), (1, 0.793)):
        assert interval(torch.zeros(n)) == (0.0, 0.0, pytest.approx(width, abs=5e-4))
        assert interval(torch.ones(n)) == (1.0, pytest.approx(1 - width, abs=5e-4), 1.0)
    assert interval(torch.full((9,), 0.3)) == pytest.approx((0.3, 0.3, 0.3))


def test_success_on_the_sets_of_an_evaluation():
    """N and N+k; the critical tokens are those of N+k."""
    model = coin_model()
    for extra, name in ((1, "N+1"), (3, "N+3")):
        cfg = config(extra=extra)
        intervals, critical = critkl.test_accuracy(model, cfg, 5)
        assert intervals.keys() >= {"N", name} and f"line1_first_n+{extra}_comma" in critical
        expected, names = examine(model, critkl.test_set(1 + extra, 5, cfg.seed), 1)
        close(intervals[name][0], expected.mean())
        assert critical == names


# --------------------------------------------------------------------------------------------------
# Files.

def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a" / "x"
    critkl.write(path, "old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match="a/x: .*No space left"):
        critkl.write(path, "new")
    assert [p.name for p in path.parent.iterdir()] == ["x"] and path.read_text() == "old"


def test_leftovers_of_killed_writers_of_a_file_are_removed_and_nothing_else(tmp_path):
    """Not what another may still be writing, not the user's own; each has a name of its own."""
    names = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda source, _: names.append(os.path.basename(source)))
        for _ in range(2):
            critkl.write(tmp_path / "x.pt", {})
    assert len(set(names)) == 2 and not list(tmp_path.iterdir())
    for name in (*names, ".notes.2024", ".bashrc"):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1e9, 1e9))
    os.utime(tmp_path / names[1])                                    # a moment ago
    critkl.write(tmp_path / "x.pt", {})
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == sorted([".notes.2024", ".bashrc", "x.pt", names[1]])


def test_two_writers_of_one_file(tmp_path):
    """Neither deletes what the other is writing; the file is always whole."""
    path, errors = tmp_path / "x", []
    contents = ["a" * 20_000, "b" * 20_000]

    def work(content):
        try:
            for _ in range(30):
                critkl.write(path, content)
                assert path.read_text() in contents
        except Exception as error:                                   # a thread has no other way
            errors.append(error)

    threads = [threading.Thread(target=work, args=[content]) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and [p.name for p in tmp_path.iterdir()] == ["x"]


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was run",)


def test_checkpoints_are_data_only(tmp_path):
    """Nothing is unpickled; garbage, other versions, other contents and nothing are refused."""
    path = tmp_path / "checkpoint.pt"
    good = dict(settings=dict(a=1, version=critkl.VERSION), x=[1.5, "a"], y=torch.ones(3))
    critkl.write(path, good)
    assert str(critkl.load(path, dict(a=1))) == str(good)
    with pytest.raises(UserError, match="checkpoint.pt.*a 1, not 2"):
        critkl.load(path, dict(a=2))
    for state in (good | dict(x=Bomb()), {}, torch.ones(2), [1]):
        torch.save(state, path)
        with pytest.raises(UserError, match="checkpoint.pt"):
            critkl.load(path, {})
    critkl.write(path, good | dict(settings=dict(version="0.1")))
    with pytest.raises(UserError, match="checkpoint.pt.*0.1"):
        critkl.load(path, {})
    for content in (b"", b"garbage", b"PK\3\4" + b"\0" * 50, None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match="checkpoint.pt"):
            critkl.load(path, {})


def test_a_bit_that_flips_is_noticed(tmp_path):
    """Anywhere in the file: refused, unless it means nothing and the content is the same."""
    path = tmp_path / "checkpoint.pt"
    critkl.write(path, dict(settings=dict(version=critkl.VERSION), x=torch.arange(300) / 7))
    whole, good = path.read_bytes(), digest(critkl.load(path, {}))
    refused, rng = 0, random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert digest(critkl.load(path, {})) == good
        except UserError:
            refused += 1
    assert refused > 20


def test_a_fingerprint_changes_with_every_setting():
    base = dict(a=1, b=2.5, c="x")
    others = [base | dict(b=2.5000001), base | dict(c="y"), base | dict(d=None), {}]
    assert critkl.fingerprint(base) == critkl.fingerprint(dict(base))
    assert len({critkl.fingerprint(x) for x in (base, *others)}) == 5


def test_csv_of_rows_with_different_names(tmp_path):
    rows = [dict(iteration=0, x=0.123456789), dict(iteration=5, y=1e-9)]
    assert critkl.csv_text(rows) == "iteration,x,y\n0,0.123457,\n5,,1e-09\n"


# --------------------------------------------------------------------------------------------------
# Runs, most of them in this process.

TINY = ("--digits 1 --layers 1 --width 16 --heads 2 --pretrain-steps 20 --pretrain-batch 4 "
        "--device cpu").split()
RL = ("--episodes 4 --minibatch 2 --epochs 1 --entropy-coef 0.01 --eval-every 2 --iterations 4 "
      "--eval-problems 4 --test-problems 8").split()
MODES = dict(pretrain="--eval-problems 4 --test-problems 8".split(), none=RL, standard=RL,
             critical=RL, dppo=RL)


@torch.no_grad()
def true_rollout(policy, problems, seed=None):
    """In place of `rollout`, in a tenth of its time: true scratchpads, half of them called right.
    """
    ids, mask = true_batch(problems)
    correct = [float(stream(seed, i).random() < 0.5) for i in range(len(problems))]
    return critkl.Rollout(problems, ids, mask, *policy(ids[:, :-1]), torch.tensor(correct))


def run(*args, sampler=true_rollout):
    """The exit code, output and errors of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(critkl, "rollout", sampler)
            code = critkl.main([str(arg) for arg in args])
    return code, out.getvalue(), err.getvalue()


def good(*args, sampler=true_rollout):
    """The output of a command line that ends well."""
    code, out, err = run(*args, sampler=sampler)
    assert (code, err) == (0, ""), err
    return out


def refused(*args):
    """The one line on stderr of a command line that ends with exit code 2."""
    code, _, err = run(*args)
    assert code == 2 and err.count("\n") == 1 and err.startswith("critkl.py: error: "), (code, err)
    return err.strip()


def start(*args, path="", **more):
    """The program as a process of its own, with modules of `path`."""
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(path))
    return subprocess.Popen(
        [sys.executable, critkl.__file__, *map(str, args)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=env, **more)


def finish(process):
    out, err = process.communicate()
    return process.returncode, out, err


def only(folder, pattern):
    found = list(folder.glob(pattern))
    assert len(found) == 1, (pattern, list(folder.iterdir()))
    return found[0]


def metrics(folder):
    """Rows of metrics.csv without the column of times."""
    with open(folder / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def state(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_same_run(one, other):
    """Bit for bit, but for times."""
    one, other = (metrics(one), state(one)), (metrics(other), state(other))
    assert one[0] == other[0] and len(one[0]) == 3
    for part in ("policy", "reference", "sampler", "optimizer", "done"):
        assert digest(one[1][part]) == digest(other[1][part]), part


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder of runs, and a function that makes the run of a mode once and returns its output."""
    folder = tmp_path_factory.mktemp("work") / "runs"

    @functools.cache
    def runs(mode):
        sampler = rollout if mode in ("none", "dppo") else true_rollout
        return good("--mode", mode, *TINY, *MODES[mode], "--out", folder, sampler=sampler)

    return folder, runs


@pytest.fixture
def critical_run(work):
    """The folder of a whole run."""
    folder, runs = work
    runs("critical")
    return only(folder, "critical-*")


@pytest.fixture
def copied(critical_run, tmp_path):
    """A copy of it, without the pretrained model."""
    shutil.copytree(critical_run, tmp_path / critical_run.name)
    return tmp_path / critical_run.name


def stopped(tmp_path, when="iteration", step=3, number=signal.SIGINT, args=RL, code=130):
    """Run with a signal at a step of a loop; returns the run folder, or the output without one."""
    seen = []

    def progress(log, what, now, total, detail=""):
        seen.append(what)
        if what == when and now == step:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critkl.Log, "progress", progress)
        found, out, err = run("--mode", "critical", *TINY, *args, "--out", tmp_path)
    assert (found, err) == (code, "") and when in seen, (found, out, err)
    return only(tmp_path, "critical-*"), out


@pytest.mark.parametrize("mode", MODES)
def test_a_real_run_of(mode, work):
    """Its files, the keys of summary.json, the table at the end, the rows of metrics.csv."""
    folder, runs = work
    out, path = runs(mode), only(folder, f"{mode}-*-seed0")
    assert sorted(p.name for p in path.iterdir()) == [
        "checkpoint.pt", "config.json", "metrics.csv", "summary.json"]
    summary, saved = (json.loads((path / name).read_text(), parse_constant=pytest.fail)
                      for name in ("summary.json", "config.json"))
    assert saved["settings"]["mode"] == mode and saved["settings"]["pretrain_steps"] == 20
    assert saved["version"] == critkl.VERSION and saved["torch"] == str(torch.__version__)
    assert (summary["mode"], summary["seed"]) == (mode, 0) and summary["peak_memory_mb"] > 10
    for name in ("accuracy", "pretrained_accuracy"):
        assert summary[name].keys() >= {"N", "N+1"}
        assert all(0 <= p <= 1 for p in summary[name].values())
    assert re.search(r"^N\+1 .*0\.0 \(0\.0 to 32\.4\)", out, re.M)   # 0 of 8: Wilson's interval
    assert {"pretrain", "rl", "total"} <= summary["seconds"].keys()
    assert set(summary["critical_tokens"]["line1_first_n+1_comma"]) == {"before", "after"}
    rows = metrics(path)
    expected = [0] if mode == "pretrain" else [0, 2, 4]
    assert [int(row["iteration"]) for row in rows] == expected
    assert rows[0].keys() >= {"accuracy_N", "accuracy_N+1", "line1_second_n+1_digit"}
    pretrained = only(folder, "pretrained-*.pt")                     # one model serves all modes
    reference = critkl.load(pretrained, {})["model"]
    assert digest(state(path)["reference"]) == digest(reference)
    if mode == "pretrain":
        assert summary["accuracy"] == summary["pretrained_accuracy"]
        assert digest(state(path)["policy"]) == digest(reference)
        return
    names = ("reward", "masked", "cut", "kl_mu", "explained_variance", "entropy", "grad_norm")
    assert all(rows[-1][name] for name in names)
    assert ("no reward" in out) == (mode in ("none", "dppo"))        # where it was sampled
    assert [float(row["lr"]) for row in rows[1:]] == pytest.approx([2.625e-4, 1.125e-4])
    assert digest(state(path)["policy"]) != digest(reference)


def test_the_first_line_says_what_differs_from_the_defaults(work):
    out = work[1]("critical").splitlines()[0]
    assert "--width 16" in out and "--digits 1" in out and "--beta" not in out
    assert str(only(work[0], "critical-*")) in out


@pytest.mark.parametrize("given", [
    dict(), *(dict(mode=mode) for mode in critkl.TRAINING_MODES),
    *(dict(method=method) for method in critkl.METHODS),
    *(dict(preset=preset) for preset in critkl.PRESETS)], ids=str)
def test_settings_can_be_read_by_any_json_parser(given):
    values = dataclasses.asdict(make_config(given))
    assert json.loads(json.dumps(values, allow_nan=False)) == values


@pytest.mark.parametrize("policy", ["pretrained", "checkpoint"])
def test_evaluate(policy, critical_run, tmp_path, monkeypatch):
    """[V] tables 4 and 5, of the pretrained model or of a checkpoint."""
    monkeypatch.setattr(critkl, "interval", functools.partial(interval, resamples=20))
    more = ["--checkpoint", critical_run] if policy == "checkpoint" else []
    if policy == "pretrained":
        shutil.copy(only(critical_run.parent, "pretrained-*.pt"), tmp_path)
    out = good("--mode", "evaluate", *TINY, "--test-problems", 4, "--out", tmp_path, *more,
               sampler=rollout)
    rows = [line.split()[:2] for line in out.splitlines()
            if line.startswith(("identical", "varying"))]
    sets = [(kind, n) for kind in ("identical", "varying") for n in ("N", "N+1", "N+2", "N+3")]
    assert rows == [list(pair) for pair in sets]
    found = json.loads(only(tmp_path, "evaluate-*/evaluation.json").read_text())
    assert [(row["set"], row["digits"]) for row in found["rows"]] == sets
    for row in found["rows"]:
        for measure in ("sampled", "greedy", "expected"):
            mean, low, high = row[measure]
            assert 0 <= low <= mean <= high <= 1
    assert found["rows"][0]["greedy"] == [0.0, 0.0, pytest.approx(0.49, abs=1e-3)]    # 0 of 4
    assert set(found["certainty_gap"]) == {"critical", "critical commas", "non-critical"}
    assert found["definition"]["listed"] >= 8                        # 4 answers, line 1, ",3"
    assert 100 < len(found["sampler"]) <= 2000
    assert all(0 < p <= 1 for pair in found["sampler"] for p in pair)
    gaps = [abs(mu - pi) for mu, pi in found["sampler"]]             # near, not the same arithmetic
    assert max(gaps) < 0.1 and 0 < sum(gaps) / len(gaps) < 0.01


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_inspect(critical_run, tmp_path):
    """The answer, plain in a file, coloured on a terminal; the certainties in JSON."""
    args = ["--mode", "inspect", *TINY, "--problem", "12+3", "--checkpoint", critical_run,
            "--out", tmp_path]
    out = good(*args, sampler=rollout)
    assert prompt(12, 3) in out and "\033" not in out
    found = json.loads(only(tmp_path, "inspect-*/inspect.json").read_text())
    assert found["text"] in out and found["problem"] == "12+3"
    assert len(found["text"]) == len(found["certainty"]) == len(found["policy"])
    J = torch.tensor(found["certainty"])
    close(found["weight"], J ** 150)
    assert all(len(place) == 5 for place in found["pretrained"])
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        assert critkl.main([str(arg) for arg in args]) == 0
    text = terminal.getvalue()
    assert "\033[31m" in text and found["text"] in re.sub(r"\033\[\d*m", "", text)


def test_bench(critical_run, tmp_path, monkeypatch):
    """Every phase of half a second: tokens/s are tokens x 2."""
    def half_a_second(call, cfg):
        call()
        return 0.5

    assert critkl.mean_seconds(float, config()) > 0
    monkeypatch.setattr(critkl, "mean_seconds", half_a_second)
    shutil.copy(only(critical_run.parent, "pretrained-*.pt"), tmp_path)
    args = ["--mode", "bench", *TINY, "--episodes", 4, "--minibatch", 4, "--out", tmp_path]
    out = json.loads(good(*args, "--json"), parse_constant=pytest.fail)
    assert json.loads(only(tmp_path, "bench-*/bench.json").read_text()) == out
    assert list(out["phases"]) == ["sampling", "scoring", "update", "pretraining"]
    phases = out["phases"]
    for phase in phases.values():
        assert phase["seconds"] == 0.5 and phase["peak_memory_mb"] > 10
    assert phases["update"]["tokens_per_second"] == 2 * phases["scoring"]["tokens_per_second"]
    assert phases["sampling"]["tokens_per_second"] == phases["scoring"]["tokens_per_second"] > 0
    assert "tokens/s" in good(*args)


def test_the_clip_is_one_fifth_at_both_ends_by_default():
    """Ratios 0.75 with A < 0 and 1.25 with A > 0 are cut to 0.8 and 1.2, [Q] Eq. 10."""
    mask = torch.tensor([[True]])
    for ratio, A, expected in ((0.75, -1.0, 0.8), (1.25, 1.0, -1.2)):
        logp = torch.tensor([[ratio]]).log()
        loss, _ = policy_loss(logp, torch.zeros(1, 1), torch.tensor([[A]]), mask)
        close(loss, expected)


def test_the_same_command_again(critical_run, work, tmp_path):
    """In another folder it gives the same run, with another seed another; in its own nothing."""
    folder, runs = work
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in critical_run.iterdir()}
    out = good("--mode", "critical", *TINY, *RL, "--out", folder)
    assert "this run is complete" in out
    assert out.splitlines()[-5:-1] == runs("critical").splitlines()[-5:-1]
    assert runs("critical").splitlines()[-1].startswith(out.splitlines()[-1])
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in critical_run.iterdir()} == before
    good("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    assert_same_run(critical_run, only(tmp_path, "critical-*"))
    good("--mode", "critical", *TINY, *RL, "--seed", 1, "--out", tmp_path)
    assert metrics(only(tmp_path, "critical-*-seed1")) != metrics(critical_run)


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("when, step, number", [
    *(("pretraining", 7, number) for number in SIGNALS), ("pretraining", 1, signal.SIGINT),
    ("pretraining", 20, signal.SIGINT), *(("iteration", 3, number) for number in SIGNALS),
    ("iteration", 1, signal.SIGINT), ("iteration", 4, signal.SIGINT),
    ("evaluating", 8, signal.SIGINT)])
def test_stopped_and_resumed_equals_straight(when, step, number, critical_run, tmp_path):
    """By Ctrl-C or a cluster's signals: exit code 130, nothing is lost, equal in the end; also in
    the last step of a loop, and in the last evaluation, where it stops at once."""
    path, out = stopped(tmp_path, when, step, number)
    assert not (path / "summary.json").exists()
    if when == "pretraining":
        saved = critkl.load(only(tmp_path, "pretrained-*.pt"), {})
        assert saved["done"] == step
        good("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    else:
        assert state(path)["done"] == (4 if when == "evaluating" else step)
        assert when == "evaluating" or f"--resume {path}" in out
        good("--resume", path)
    assert_same_run(critical_run, path)


@pytest.mark.parametrize("mode, more", [
    ("evaluate", ["--test-problems", 2]), ("inspect", ["--problem", "1+2"]), ("bench", [])])
def test_ctrl_c_keeps_the_pretraining_of_every_mode(mode, more, tmp_path):
    path_before = signal.getsignal(signal.SIGINT)

    def progress(log, what, now, total, detail=""):
        if (what, now) == ("pretraining", 7):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critkl.Log, "progress", progress)
        code, _, err = run("--mode", mode, *TINY, *more, "--out", tmp_path)
    assert (code, err) == (130, "") and signal.getsignal(signal.SIGINT) == path_before
    assert critkl.load(only(tmp_path, "pretrained-*.pt"), {})["done"] == 7


def test_a_second_signal_stops_at_once_and_handlers_are_given_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with critkl.Log() as log:
        log.patient = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert log.stop_requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with critkl.Log() as log:
        assert not log.stop_requested
        with pytest.raises(KeyboardInterrupt):                       # nothing to be saved
            os.kill(os.getpid(), signal.SIGHUP)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_handlers_are_given_back_by_every_end_of_main(critical_run, copied):
    before = [signal.getsignal(number) for number in SIGNALS]
    good("--resume", critical_run)
    (copied / "summary.json").unlink()
    (copied / "checkpoint.pt").write_bytes(b"")
    refused("--resume", copied)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_stale_sampler_is_kept_over_a_stop(tmp_path):
    """The sampler's weights are those of iteration 0, in bfloat16; a fresh one differs."""
    stale = [*RL, "--staleness", 4, "--sampler-dtype", "bfloat16"]
    path, _ = stopped(tmp_path / "stopped", step=3, args=stale)
    saved = state(path)
    assert saved["sampler"]["embedding.weight"].dtype == torch.bfloat16
    for name, x in saved["sampler"].items():
        assert torch.equal(x, saved["reference"][name].bfloat16())
    good("--resume", path)
    straight, fresh = tmp_path / "straight", tmp_path / "fresh"
    good("--mode", "critical", *TINY, *stale, "--out", straight)
    assert_same_run(path, only(straight, "critical-*"))
    good("--mode", "critical", *TINY, *RL, "--sampler-dtype", "bfloat16", "--out", fresh)
    assert metrics(path)[1:] != metrics(only(fresh, "critical-*"))[1:]
    assert float(metrics(path)[1]["ratio_max"]) > 1


def test_killed_at_random_moments_it_goes_on_from_a_whole_checkpoint(tmp_path):
    """SIGKILL, twice or KILLS times: `KILLS=50 python -m pytest -k killed`; equal in the end, and
    nothing is left behind."""
    args = ["--mode", "critical", *TINY, *RL, "--eval-every", 1, "--iterations", 8]
    rng, killed = random.Random(0), 0
    for _ in range(int(os.environ.get("KILLS", 2))):
        process = start(*args, "--out", tmp_path)
        for line in process.stdout:
            if line.startswith("iteration") or "goes on" in line:
                break
        time.sleep(rng.random())
        process.kill()
        code, _, err = finish(process)
        assert code in (0, -signal.SIGKILL), err
        killed += code != 0
        path = only(tmp_path, "critical-*")
        rows = metrics(path)
        assert [int(row["iteration"]) for row in rows] == list(range(len(rows)))
        assert all(None not in row and None not in row.values() for row in rows)
        assert 0 <= len(critkl.load(path / "checkpoint.pt", {})["rows"]) - len(rows) <= 1
    (path / ".checkpoint.pt.0123456789ab.critkl").write_bytes(b"half")
    for left in path.glob(".*.critkl"):  # also what a kill left
        os.utime(left, (1e9, 1e9))
    (path / ".notes.2024").write_text("mine")
    (path / "summary.json").unlink(missing_ok=True)                  # one that was not killed
    good(*args, "--out", tmp_path, sampler=rollout)
    assert killed and [p.name for p in tmp_path.rglob(".*")] == [".notes.2024"]
    good(*args, "--out", tmp_path / "straight", sampler=rollout)
    straight = only(tmp_path / "straight", "critical-*")
    assert metrics(path) == metrics(straight) and len(metrics(path)) == 9
    assert digest(state(path)["policy"]) == digest(state(straight)["policy"])


def test_a_real_process_that_is_asked_to_stop(tmp_path):
    """SIGTERM by a real kill: the work is saved, the hint can be pasted, stderr stays empty."""
    process = start("--mode", "critical", *TINY, *RL, "--iterations", 500, "--out", "my runs",
                    cwd=tmp_path)
    for line in process.stdout:
        if line.startswith("iteration    2"):
            break
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    path = only(tmp_path / "my runs", "critical-*")
    done = state(path)["done"]
    assert (code, err) == (130, "") and f"stopped after {done} of 500" in out and done >= 2
    words = shlex.split(out.strip().splitlines()[-1])
    assert words[words.index("--resume") + 1] == str(path.relative_to(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_at_the_start_still_is(number, tmp_path):
    """As SIGHUP under nohup, Ctrl-C in a script's background: the run goes on."""
    ignore = functools.partial(signal.signal, number, signal.SIG_IGN)
    process = start("--mode", "none", *TINY, *MODES["none"], "--out", tmp_path, preexec_fn=ignore)
    for line in process.stdout:
        if line.startswith("iteration    0"):
            break
    process.send_signal(number)
    code, _, err = finish(process)
    assert (code, err) == (0, "") and (only(tmp_path, "none-*") / "summary.json").exists()


def test_asked_to_stop_in_the_first_evaluation_or_the_last_save(tmp_path, monkeypatch, critical_run):
    """Before the first iteration, and while pretraining is saved for the last time."""
    def then_interrupted(call):
        def wrapped(run, *args, **more):
            found = call(run, *args, **more)
            os.kill(os.getpid(), signal.SIGINT)
            return found
        return wrapped

    args = ["--mode", "critical", *TINY, *RL, "--out", tmp_path]
    for part in (critkl.PretrainingRun, critkl.Run):
        method = "save" if part is critkl.PretrainingRun else "evaluate"
        with monkeypatch.context() as patch:
            patch.setattr(part, method, then_interrupted(getattr(part, method)))
            code, out, err = run(*args)
        assert (code, err) == (130, "") and "to go on: the same command" in out
    path = only(tmp_path, "critical-*")
    assert state(path)["done"] == 0 and "stopped after 0 of 4" in out
    good("--resume", path)
    assert_same_run(critical_run, path)


def test_resume_from_inside_the_folder(tmp_path, monkeypatch):
    """Its pretrained model is beside it, not in it."""
    path, _ = stopped(tmp_path, "pretraining", 7)
    monkeypatch.chdir(path)
    good("--resume", ".")
    assert (path / "summary.json").exists() and not list(path.glob("pretrained-*"))


def test_a_run_of_another_version_is_not_taken_for_complete(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | dict(version="1.0")))
    assert "version 1.0" in refused("--resume", copied)


def test_ctrl_c_in_the_first_second(tmp_path):
    """130 and nothing else, also while torch is imported (here one that takes long)."""
    (tmp_path / "torch.py").write_text("print('here', flush=True); import time; time.sleep(60)")
    process = start("--mode", "critical", path=tmp_path)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code in (130, -signal.SIGINT) and err == "", err


def test_progress_is_a_line_every_20_seconds(monkeypatch, capsys):
    """By a clock that no one sets back."""
    times = iter([100, 119, 120, 139, 140, 200])
    clock = types.SimpleNamespace(monotonic=lambda: next(times), sleep=None, time=pytest.fail)
    monkeypatch.setattr(critkl, "time", clock)
    log = critkl.Log()
    for step in (1, 2, 3, 4, 5):
        log.progress("x", step, 5, "y")
    assert capsys.readouterr().out.splitlines() == ["x 2/5  y", "x 4/5  y", "x 5/5  y"]


def test_a_clock_that_is_set_back(tmp_path, monkeypatch):
    """Wall-clock time falls by an hour at every call; durations stay what they are."""
    falling = itertools.count(1e9, -3600)
    real = types.SimpleNamespace(**vars(time))
    real.time = lambda: next(falling)
    monkeypatch.setattr(critkl, "time", real)
    good("--mode", "pretrain", *TINY, *MODES["pretrain"], "--out", tmp_path)
    path = only(tmp_path, "pretrain-*")
    seconds = json.loads((path / "summary.json").read_text())["seconds"]
    assert all(0 <= x < 1000 for x in seconds.values())
    assert 0 <= state(path)["seconds"] < 1000


# --------------------------------------------------------------------------------------------------
# A run folder is all that a run needs, and what it holds is checked.

@pytest.mark.parametrize("how", ["copy", "link"])
def test_a_run_folder_goes_on_alone(how, tmp_path, critical_run, monkeypatch):
    """Stopped, then moved to a place without its pretrained model: the reference is in it."""
    path, _ = stopped(tmp_path / "here")
    there = tmp_path / "there" / path.name
    there.parent.mkdir()
    if how == "copy":
        shutil.copytree(path, there)
    else:
        there.symlink_to(path)
    monkeypatch.setattr(critkl, "pretrain", lambda *_: pytest.fail("it pretrains anew"))
    good("--resume", there)
    assert_same_run(critical_run, there)
    assert [p.name for p in (tmp_path / "there").iterdir()] == [path.name]


def test_seeds_never_share_a_pretrained_model(tmp_path):
    """Two whose crc32 is the same did."""
    models = []
    for seed in (1313464150, 914522848):
        cfg = config(seed=seed, out=str(tmp_path))
        model = critkl.new_model(cfg)
        models.append(critkl.PretrainingRun(cfg, critkl.Log(), model, []).path)
    assert models[0] != models[1]


def flip_a_bit_of_the_weights(path):
    """In the weights themselves; the rest of the file stays."""
    whole = bytearray(path.read_bytes())
    content = torch.load(path, weights_only=True)
    tensor = content.get("model", content.get("policy"))["embedding.weight"]
    place = whole.index(tensor.numpy().tobytes()[:64])
    whole[place + 5] ^= 4
    path.write_bytes(whole)


@pytest.mark.parametrize("damage", ["bit", "garbage", "other seed", "other width", "no settings"])
def test_a_pretrained_model_that_is_not_its_own(damage, critical_run, tmp_path):
    """Damaged, of another seed or shape under its name: one line, and every file stays."""
    path = tmp_path / only(critical_run.parent, "pretrained-*.pt").name
    shutil.copy(critical_run.parent / path.name, path)
    saved = critkl.load(path, {})
    if damage == "bit":
        flip_a_bit_of_the_weights(path)
    elif damage == "garbage":
        path.write_bytes(b"garbage")
    elif damage == "other seed":
        critkl.write(path, saved | dict(settings=saved["settings"] | dict(seed=3)))
    elif damage == "other width":
        critkl.write(path, saved | dict(model=GPT(1, 32, 2).state_dict()))
    else:
        critkl.write(path, saved | dict(settings={}))
    before = files(tmp_path)
    assert path.name in refused("--mode", "none", *TINY, *RL, "--out", tmp_path)
    assert before.items() <= files(tmp_path).items()
    assert not list(tmp_path.glob("*/checkpoint.pt"))


@pytest.mark.parametrize("damage", [
    "bit", "garbage", "empty", "half", "version", "other model", "no fields", "of another run"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_kept(damage, copied, work):
    """One line that names it, whether damaged or whole but wrong; every file stays as it was."""
    path = copied / "checkpoint.pt"
    (copied / "summary.json").unlink()
    saved, whole = critkl.load(path, {}), path.read_bytes()
    if damage == "bit":
        flip_a_bit_of_the_weights(path)
    elif damage in ("garbage", "empty", "half"):
        path.write_bytes(dict(garbage=b"garbage", empty=b"", half=whole[:len(whole) // 2])[damage])
    elif damage == "of another run":
        work[1]("none")
        shutil.copy(only(work[0], "none-*") / "checkpoint.pt", path)
    elif damage == "no fields":
        critkl.write(path, dict(version=critkl.VERSION))
    elif damage == "version":
        critkl.write(path, saved | dict(settings=saved["settings"] | dict(version="1.0")))
    else:
        critkl.write(path, saved | dict(policy=GPT(1, 32, 2).state_dict()))
    before = files(copied)
    assert "checkpoint.pt" in refused("--resume", copied)
    assert files(copied) == before


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", "5", '{"intervals": 5}', '{"intervals": {}}', "{}", "\udcff", "NaN"])
def test_a_damaged_summary_is_made_again(text, copied, critical_run):
    """From the checkpoint, or one line."""
    (copied / "summary.json").write_bytes(text.encode(errors="surrogateescape"))
    code, _, err = run("--resume", copied)
    assert code == 0 and err == "" or code == 2 and err.count("\n") == 1, err
    if code == 0:
        found = json.loads((copied / "summary.json").read_text())
        expected = json.loads((critical_run / "summary.json").read_text())
        assert found["intervals"] == expected["intervals"]


@pytest.mark.parametrize("text", [
    "", "{", "[]", '{"settings": []}', '{"settings": {"foo": 1}}', '{"settings": {"digits": "3"}}',
    "\udcff", '{"settings": {"digits": ' + "9" * 5000 + "}}"])
def test_a_damaged_config_is_refused(text, copied):
    (copied / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    (copied / "summary.json").unlink()
    before = files(copied)
    assert str(copied) in refused("--resume", copied)
    assert str(copied) in refused("--mode", "critical", *TINY, *RL, "--out", copied.parent)
    assert files(copied) == before


@pytest.mark.parametrize("name, value", [
    ("digits", "3"), ("digits", None), ("lr", [1]), ("mode", "banana"), ("mode", {}), ("name", 5),
    ("name", "../x"), ("width", 15), ("episodes", True), ("alpha", -1)])
def test_a_config_with_a_wrong_value_is_refused(name, value, copied):
    config_file = copied / "config.json"
    saved = json.loads(config_file.read_text())
    saved["settings"][name] = value
    config_file.write_text(json.dumps(saved))
    assert name in refused("--resume", copied)


def test_only_a_run_with_the_same_settings_is_resumed(copied, tmp_path):
    """Another setting beside --resume is named; another name of the folder is fine."""
    assert "lr 0.0003, not 0.1" in refused("--resume", copied, "--lr", "0.1")
    copied.rename(tmp_path / "renamed")
    good("--resume", tmp_path / "renamed")
    assert "nowhere" in refused("--resume", tmp_path / "nowhere")
    assert [p.name for p in tmp_path.iterdir()] == ["renamed"]


def test_one_name_for_two_settings_is_refused(tmp_path):
    args = ["--mode", "pretrain", *TINY, *MODES["pretrain"], "--name", "x", "--out", tmp_path]
    good(*args)
    before = files(tmp_path)
    assert "dial" in refused(*args, "--dial", 0.1)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name, value", [
    ("heads", 1), ("temperature", 2.0), ("seed", 3), ("digits", 2), ("mistakes", 0.1)])
def test_a_checkpoint_of_another_configuration_is_refused(name, value, critical_run, tmp_path):
    """Also where the shapes of the weights are the same."""
    line = refused("--mode", "evaluate", *TINY, f"--{name}", value, "--out", tmp_path,
                   "--checkpoint", critical_run)
    assert name in line and not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_not_looked_at(copied, tmp_path):
    flip_a_bit_of_the_weights(copied / "checkpoint.pt")
    assert "checkpoint.pt" in refused("--mode", "evaluate", *TINY, "--out", tmp_path / "out",
                                      "--checkpoint", copied)
    assert not (tmp_path / "out").exists()


def test_the_policy_of_a_checkpoint_is_the_one_looked_at(critical_run, tmp_path):
    """Its settings need not be given again."""
    cfg, _ = critkl.parse(["--mode", "evaluate", "--device", "cpu", "--out", str(tmp_path),
                           "--checkpoint", str(critical_run)])
    assert (cfg.digits, cfg.width, cfg.pretrain_steps) == (1, 16, 20)
    log = critkl.Log(quiet=True)
    reference, policy = critkl.chosen_policy(cfg, log, tmp_path / "x")
    saved = state(critical_run)
    for name in ("policy", "reference"):
        model = dict(policy=policy, reference=reference)[name]
        assert digest(model.state_dict()) == digest(saved[name])


def test_every_process_has_a_gpu_and_all_have_the_same_settings(monkeypatch):
    """Under torchrun "cuda" stays "cuda", else each process would look for another folder."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", functools.partial(int, 2))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "empty", lambda *shape, **more: None)
    folders = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        cfg = make_config(dict(device="cuda"))
        critkl.start(cfg)
        folders.add(critkl.run_folder(cfg))
    assert chosen == [0, 1] and len(folders) == 1
    cfg = make_config(dict(device="cuda:2"))
    with pytest.raises(UserError, match="cuda:2"):
        critkl.start(cfg)


# --------------------------------------------------------------------------------------------------
# Nothing that is not finite is saved.

def poison_pretraining(monkeypatch, at):
    """A weight becomes nan after this step."""
    step, count = critkl.Muon.step, itertools.count(1)

    def poisoned(optimizer):
        step(optimizer)
        if next(count) == at:
            optimizer.param_groups[0]["params"][0].data.fill_(NAN)

    monkeypatch.setattr(critkl.Muon, "step", poisoned)


def test_nan_after_the_last_step_of_pretraining(tmp_path, monkeypatch):
    """No model is saved, which would poison all later runs."""
    poison_pretraining(monkeypatch, 20)
    line = refused("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    assert "not finite" in line and not list(tmp_path.glob("*.pt"))


def test_nan_in_the_midst_of_pretraining(tmp_path, monkeypatch):
    poison_pretraining(monkeypatch, 5)
    line = refused("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    assert "pretraining" in line and "nan" in line and not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("when", [3, 4])
def test_nan_after_an_update(when, tmp_path, monkeypatch):
    """In the midst or at the end of a run: one line that names the last good checkpoint, which
    stays, as do the rows before."""
    def poisoned(policy, optimizer, batch, cfg, iteration):
        info = update(policy, optimizer, batch, cfg, iteration)
        if iteration + 1 == when:
            policy.embedding.weight.data[5] = NAN
        return info

    monkeypatch.setattr(critkl, "update", poisoned)
    line = refused("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    path = only(tmp_path, "critical-*")
    assert not (path / "summary.json").exists()
    assert ("iteration" if when == 3 else str(path / "checkpoint.pt")) in line
    saved = critkl.load(path / "checkpoint.pt", {})
    assert saved["done"] == 2 and all(x.isfinite().all() for x in saved["policy"].values())
    assert [row["iteration"] for row in metrics(path)] == ["0", "2"]
    monkeypatch.undo()
    good("--resume", path)


# --------------------------------------------------------------------------------------------------
# What the system refuses.

def test_metrics_that_are_held_open_elsewhere(tmp_path, critical_run, monkeypatch):
    """As by a spreadsheet on Windows: the run goes on and warns; at its end it asks for the file,
    and the same command makes it once it can."""
    replace = os.replace

    def refuse(source, target):
        if os.path.basename(target) == "metrics.csv":
            raise PermissionError(13, "Permission denied", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    code, out, err = run("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    path = only(tmp_path, "critical-*")
    assert code == 2 and err.count("\n") == 1 and "metrics.csv" in err
    assert out.count("warning") == 3 and str(path / "metrics.csv") in out
    assert len(state(path)["rows"]) == 3 and not (path / "metrics.csv").exists()
    assert not list(path.glob(".*"))
    monkeypatch.undo()
    good("--resume", path)
    assert_same_run(path, critical_run)


def test_the_time_before_a_stop_counts(tmp_path):
    path, _ = stopped(tmp_path)
    saved = critkl.load(path / "checkpoint.pt", {})
    critkl.write(path / "checkpoint.pt", saved | dict(seconds=1000.0, pretrain_seconds=500.0))
    good("--resume", path)
    seconds = json.loads((path / "summary.json").read_text())["seconds"]
    assert seconds["pretrain"] == 500 and 1000 <= seconds["rl"] < 1100
    assert seconds["total"] == seconds["pretrain"] + seconds["rl"]


def test_metrics_are_made_again_from_the_checkpoint(tmp_path, critical_run):
    path, _ = stopped(tmp_path)
    (path / "metrics.csv").unlink()
    good("--resume", path)
    assert_same_run(path, critical_run)


@pytest.mark.parametrize("mode", ["critical", "evaluate"])
def test_a_folder_that_cannot_be_written(mode, tmp_path):
    """A file in its place stops root, too."""
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "runs"):
        line = refused(*TINY, "--test-problems", 3, "--mode", mode, "--out", out)
        assert str(tmp_path / "file") in line and "config.json: cannot be written" in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mode", ["critical", "evaluate"])
def test_a_full_disk(mode, tmp_path):
    """No file may grow beyond 12 kB: one line that names the file, no half-written one left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12000, hard))
    try:
        line = refused("--mode", mode, *TINY, "--test-problems", 3, "--out", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "pretrained-" in line and str(tmp_path) in line
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["config.json"]


def test_a_disk_that_fills_up_while_it_trains(tmp_path, critical_run, monkeypatch):
    """The line names the file that was not written; its last version goes on."""
    replace, count = os.replace, itertools.count()

    def refuse(source, target):
        if os.path.basename(target) == "checkpoint.pt" and next(count) == 2:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    line = refused("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    path = only(tmp_path, "critical-*")
    assert str(path / "checkpoint.pt") in line and "No space left" in line
    assert state(path)["done"] == 2
    good("--resume", path)
    assert_same_run(path, critical_run)


def test_memory_that_runs_out_is_one_line(monkeypatch):
    for error in (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), MemoryError()):
        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(critkl, "train", fail)
        refused(*TINY)
    monkeypatch.setattr(critkl, "train", lambda *_: torch.empty(1 << 60))
    assert "memory" in refused(*TINY)


def test_a_model_that_does_not_fit_is_one_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    try:
        line = refused("--width", 16384, "--layers", 96, "--device", "cpu", "--out", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "allocate" in line


# --------------------------------------------------------------------------------------------------
# What it prints.

def test_output_that_cannot_show_a_name(tmp_path, critical_run):
    """Standard output in ASCII, a folder called é: shown as well as it can be."""
    shutil.copytree(critical_run, tmp_path / "é")
    for encoding in ("ascii", "cp1252"):
        stream_out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        with contextlib.redirect_stdout(stream_out):
            assert critkl.main(["--resume", str(tmp_path / "é")]) == 0
        stream_out.flush()
        assert b"this run is complete" in stream_out.buffer.getvalue()


class Closed(io.StringIO):
    """A pipe whose reader has gone after some lines."""
    lines = 2

    def write(self, text):
        if self.lines <= 0:
            raise BrokenPipeError(32, "Broken pipe")
        self.lines -= text.count("\n")
        return len(text)


def test_output_that_is_gone(tmp_path, critical_run, monkeypatch):
    """The run goes on in silence."""
    monkeypatch.setattr(critkl, "rollout", true_rollout)
    monkeypatch.setattr(sys, "stdout", Closed())
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert critkl.main(["--mode", "critical", *TINY, *RL, "--out", str(tmp_path)]) == 0
    monkeypatch.undo()
    assert errors.getvalue() == ""
    assert_same_run(only(tmp_path, "critical-*"), critical_run)


def test_a_real_pipe_that_is_closed(tmp_path):
    """As by `| head -1`: no traceback, also at the exit, and the run is whole."""
    process = start("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(), err) == (0, "")
    assert len(metrics(only(tmp_path, "critical-*"))) == 3


def test_a_home_folder(tmp_path, critical_run, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    good("--mode", "pretrain", *TINY, *MODES["pretrain"], "--out", "~/runs")
    path = only(tmp_path / "runs", "pretrain-*")
    good("--resume", f"~/runs/{path.name}")
    good("--mode", "inspect", *TINY, "--problem", "1+2", "--checkpoint", f"~/runs/{path.name}",
         "--out", "~/runs")
    assert not os.path.exists("~")


# --------------------------------------------------------------------------------------------------
# Several processes.

TWO_PROCESSES = '''
import sys, torch, critkl as c

def one_update(batch):
    """The gradient of one update, and what was gathered for it."""
    cfg = c.make_config(dict(digits=1, episodes=8, minibatch=8, epochs=1, max_grad_norm=0.0,
                             entropy_coef=0.1))
    torch.manual_seed(0)
    policy, reference = c.GPT(2, 16, 2), c.GPT(2, 16, 2)
    for p in [*policy.parameters(), *reference.parameters()]:
        torch.nn.init.normal_(p, std=0.3)
    rng = c.stream(0)
    sampled = c.rollout(policy, [c.rl_problem(rng, cfg) for _ in range(8)], 0)
    sampled.correct = (torch.arange(8) % 3 == 0).float()
    batch = c.prepare(sampled, policy, reference, cfg)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    info = c.update(policy, optimizer, batch, cfg, 0)
    examined = [c.examine(policy, sampled.problems[:n], 1) for n in (1, 5)]
    grads = [p.grad for p in policy.parameters()]
    return dict(grads=grads, ids=sampled.ids, logits_ref=batch.logits_ref, info=info,
                expected=[e for e, _ in examined], critical=[p for _, p in examined])

def end(run, end=c.Run.end):
    """In the midst of a run, where the processes are connected."""
    found = one_update(run)
    if c.RANK == 0:
        torch.save(found, sys.argv[-1] + "/update")
    c.write(c.Path(sys.argv[-1]) / f"by-{c.RANK}", "")
    end(run)

c.Run.end = end
if __name__ == "__main__":
    code = c.main(sys.argv[1:])
    sys.stdout.flush()
    c.os._exit(code)
'''


def test_two_processes_learn_what_one_does(tmp_path):
    """The same rollouts, the gradient of one update within 1e-6, the same run from pretraining to
    summary.json; only rank 0 writes and prints."""
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    args = ["--mode", "critical", *TINY, *RL, "--iterations", 2, "--pretrain-steps", 6, "--name",
            "x", "--out"]
    env = os.environ | dict(
        OMP_NUM_THREADS="1", PYTHONPATH=os.path.dirname(os.path.abspath(critkl.__file__)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               script, *args, tmp_path / "two"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out problems") == 1
    spec = importlib.util.spec_from_file_location("two_processes", script)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critkl.Run, "end", critkl.Run.end)             # undone after the test
        spec.loader.exec_module(module)
        patch.setattr(sys, "argv", ["x", str(tmp_path / "one")])
        good(*args, tmp_path / "one", sampler=rollout)
    folders = [tmp_path / n / "critical-x-seed0" for n in ("one", "two")]
    assert sorted(p.name for p in folders[1].iterdir()) == [
        "checkpoint.pt", "config.json", "metrics.csv", "summary.json"]
    assert (tmp_path / "two" / "by-0").exists() and not (tmp_path / "two" / "by-1").exists()
    one, two = (torch.load(tmp_path / name / "update", weights_only=True)
                for name in ("one", "two"))
    assert torch.equal(one["ids"], two["ids"])
    assert max(g.abs().max() for g in one["grads"]) > 1e-3
    for a, b in zip(one["grads"], two["grads"]):
        close(a, b, 1e-6)
    for name in one["info"]:
        close(one["info"][name], two["info"][name], 1e-4)
    close(one["logits_ref"], two["logits_ref"])
    assert [len(e) for e in two["expected"]] == [1, 5]
    assert all(a == pytest.approx(b) for a, b in zip(one["critical"], two["critical"]))
    for a, b in zip(one["expected"], two["expected"]):
        close(a, b)
    one, two = map(metrics, folders)
    assert len(one) == len(two) == 2
    for a, b in zip(one, two):
        assert a.keys() == b.keys()
        for name in a.keys() - {"grad_norm"}:
            assert a[name] == b[name] == "" or abs(float(a[name]) - float(b[name])) < 1e-3, name


def torchrun(monkeypatch, world):
    """Its environment."""
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", str(world))):
        monkeypatch.setenv(name, value)


def test_a_world_of_one(critical_run, monkeypatch):
    torchrun(monkeypatch, 1)
    good("--resume", critical_run)


@pytest.mark.parametrize("more", [
    ["--minibatch", 1, "--episodes", 3], ["--pretrain-batch", 3], ["--mode", "evaluate"]])
def test_processes_must_divide_the_batches_and_train(more, tmp_path, monkeypatch):
    torchrun(monkeypatch, 2)
    line = refused(*TINY, *more, "--out", tmp_path / "runs")
    assert "2 processes" in line and "--minibatch" in line and not (tmp_path / "runs").exists()


# --------------------------------------------------------------------------------------------------
# Command line: bad input.

@pytest.mark.parametrize("args", [
    "--mode banana", "--preset desktop", "--lr -1", "--lr nan", "--lr fast", "--alpha nan",
    "--alpha -0.5", "--alpha inf", "--kl-coef 2", "--value-coef inf", "--beta -3", "--digits 0",
    "--digits 2.5", "--episodes -4", "--minibatch 3", "--width 15", "--gamma 1.5", "--top-k 0",
    "--delta nan --mode dppo", "--temperature 0", "--eval-problems 0", "--seed -1", "--kl-kind k4",
    "--relax both --method dppo", "--staleness 0", "--iterations 1e3", "--certainty entropy",
    "--name a/../../../x", "--banana 3", "--checkpoint nowhere --mode evaluate",
    "--problem 12x+3 --mode inspect", "--checkpoint runs --mode none", "--width 12",
    "--ratio-cap 1e300", "--eps-high 1e300", f"--window {10 ** 30}", f"--iterations {'9' * 60}",
    f"--pretrain-steps {'9' * 60}", f"--digits {'9' * 5000}", "--eval-problems 300000",
    "--episodes 16384", "--pretrain-batch 20000", "--mistakes 1.5", "--mistakes nan", "--extra 4",
    "--device cuda:x", "--device tpu", "--device cuda:999", "--device cpu:1", "--mistake 0.5"])
def test_bad_input_is_named_and_nothing_is_written(args, tmp_path):
    flag, value = args.split()[:2]
    line = refused(*TINY, "--out", tmp_path / "runs", *args.split())
    value = value.replace("1e300", "1e+300")                         # as Python writes the number
    assert value in line and (flag in line or flag == "--checkpoint")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there(device, tmp_path):
    there = torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()
    if there:
        pytest.skip(f"there is {device}")
    line = refused("--device", device, "--out", tmp_path / "x")
    assert f"--device {device}" in line and not list(tmp_path.iterdir())


def test_exit_code_of_the_process(tmp_path):
    code, out, err = finish(start("--lr", "-1", "--out", tmp_path / "x"))
    assert (code, out, err.count("\n")) == (2, "", 1) and "--lr -1" in err


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        critkl.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for field in dataclasses.fields(critkl.Config):
        assert f"--{field.name.replace('_', '-')} " in text
