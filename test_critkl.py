"""Tests of critkl.py, in its order: `python -m pytest`, under 3 minutes on 2 CPU cores.

Expected numbers are worked by hand or by a slow loop written from the definition, never by the code under
test. Nothing here asserts a time. Models are tiny and N = 1 wherever it does not matter.
"""
import copy
import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types

import pytest
import torch
from hypothesis import given, settings, strategies as st

import critkl
import plots
from critkl import (
    VOCABULARY, GPT, UserError, bootstrap, certainty, collate, critical_tokens, decode, divergence, encode, entropy,
    examine, gae, generate, gumbel, held_out, is_correct, kl_estimate, kl_exact, kl_weight, make_config, masked_mean,
    parse_problem, policy_loss, ppo_loss, prepare, prompt, rollout, scratchpad, stream, token_logp, true_batch,
    trust_region_mask, update, whiten)

torch.set_num_threads(1)
settings.register_profile("tests", max_examples=100, deadline=None, derandomize=True, database=None)
settings.load_profile("tests")
NAN, INF = math.nan, math.inf
plots_file = os.path.join(os.path.dirname(os.path.abspath(critkl.__file__)), "plots.py")
KINDS = ("binary_tv", "binary_kl", "topk_tv", "topk_kl", "tv", "kl")
PROBLEMS = [(3, 4), (7, 8), (5, 16)]


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


def config(**given):
    return make_config(dict(digits=1, layers=1, width=16, heads=2, device="cpu", episodes=4, minibatch=4) | given)


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
    """Trained on two problems; sure of all but the answer: right with probability heads/3, else "0"."""
    torch.manual_seed(0)
    model, problems = GPT(2, 64, 2), PROBLEMS[:2]
    for block in model.blocks:
        torch.nn.init.normal_(block.out.weight, std=0.05)
        torch.nn.init.normal_(block.down.weight, std=0.05)
    right = [encode(scratchpad(*p)) for p in problems]
    wrong = [encode(scratchpad(*p).partition("</scratch>\n")[0] + "</scratch>\n0\n") for p in problems]
    ids, mask = collate([encode(prompt(*p)) for p in problems] * 3, right * heads + wrong * (3 - heads))
    optimizers = critkl.pretraining_optimizers(model, config())
    for step in range(100):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 100)
            optimizer.zero_grad()
        (-masked_mean(token_logp(model(ids[:, :-1])[0], ids[:, 1:]), mask)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


def prepared(cfg, policy, reference, mu=None):
    """Rollouts of mu (else of the policy), half of them called right, ready for ppo_loss."""
    batch = rollout(mu or policy, [(3, 4), (7, 8), (0, 0), (99, 1)][:cfg.episodes], seed=1)
    batch.correct = torch.arange(cfg.episodes) % 2.0                 # a random model never is
    prepare(batch, policy, reference, cfg)
    return batch


def gradient(loss, model):
    """Of all parameters, as one vector."""
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, model.parameters())])


def loss_and_gradient(cfg, batch, policy, rows=range(4)):
    loss, _ = ppo_loss(policy, batch, rows, cfg)
    return torch.cat((loss[None], gradient(loss, policy)))


# ----------------------------------------------------------------------------------------------------
# Configuration.

@pytest.mark.parametrize("given, expected", [
    (dict(mode="none"), dict(penalty="none", trust_region="clip")),
    (dict(mode="standard"), dict(penalty="standard", trust_region="clip")),
    (dict(mode="critical"), dict(penalty="critical", trust_region="clip", beta=150.0, kl_kind="k2")),
    (dict(mode="dppo"), dict(penalty="none", trust_region="divergence", delta=0.15)),
    (dict(method="minirl_tis"), dict(trust_region="clip", eps_low=0.2, eps_high=0.28, anchor="recomputed",
                                     ratio_cap=3.0)),
    (dict(method="cispo"), dict(trust_region="none", ratio_cap=3.0, anchor="rollout")),
    (dict(method="negative_only"), dict(trust_region="negative", delta=0.5)),
    (dict(preset="paper"), dict(digits=7, epochs=1, lr=1e-6, kl_coef=5.0, value_coef=0.1, entropy_coef=5e-4)),
    (dict(preset="laptop7", mode="dppo", trust_region="clip", dial=0.5),
     dict(digits=7, trust_region="clip", dial=0.5))])
def test_modes_and_presets_set_defaults_only(given, expected):
    cfg = make_config(given)
    assert {name: getattr(cfg, name) for name in expected} == expected


@pytest.mark.parametrize("field", [f for f in dataclasses.fields(critkl.Config) if f.type in (int, float)],
                         ids=lambda f: f.name)
def test_every_number_outside_its_range_is_named(field):
    low, high = field.metadata["low"], field.metadata["high"]
    for value in [NAN, low - 1] + [high + 1] * (high < INF):
        with pytest.raises(UserError, match=re.escape(f"--{field.name.replace('_', '-')} {value}")):
            make_config({field.name: value})


# ----------------------------------------------------------------------------------------------------
# Tokens.

@given(st.text(VOCABULARY))
def test_41_tokens_round_trip(text):
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 41
    assert decode(encode(text)) == decode(torch.tensor(encode(text), dtype=torch.long)) == text


@pytest.mark.parametrize("character", ["x", "٣", "３", "\r", "\0", "é"])
def test_unknown_character_is_named(character):
    with pytest.raises(UserError, match=re.escape(repr(character))):
        encode("12" + character + "4")


# ----------------------------------------------------------------------------------------------------
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
    assert scratchpad(*problem) == LAYOUTS[problem] and prompt(*problem) == "Input:\n%d+%d\nTarget:" % problem
    assert [len(scratchpad(10 ** n - 1, 10 ** n - 1)) for n in (3, 4, 5)] == [220, 289, 364]


NUMBERS = st.integers(1, 12).flatmap(lambda n: st.integers(10 ** (n - 1) if n > 1 else 0, 10 ** n - 1))


@given(NUMBERS, NUMBERS)
def test_scratchpad_against_integer_arithmetic(a, b):
    """Each line again, from a, b and its number k alone, by division and remainder; it is graded right."""
    left = lambda x, k: ",".join(str(x)[:max(0, len(str(x)) - k)])
    lines, length = [], max(len(str(a)), len(str(b)))
    for k in range(length + 1):
        i, j, carry = a // 10 ** k % 10, b // 10 ** k % 10, (a % 10 ** k + b % 10 ** k) // 10 ** k
        done = ",".join(str((a + b) % 10 ** k).zfill(k)) if k else ""
        total = i + j + carry
        step = f" , C={carry} , {i}+{j}+{carry}={total} , A->{total % 10} , C->{total // 10}"
        lines.append(f"[{left(a, k)}] + [{left(b, k)}] , A=[{done}]" + (step if k < length else f" C={carry} , END"))
    assert scratchpad(a, b) == "\n".join(["", "<scratch>", *lines, "</scratch>", " ".join(str(a + b)), ""])
    assert is_correct(a, b, scratchpad(a, b)) and not is_correct(a, b + 1, scratchpad(a, b))


@pytest.mark.parametrize("answer", [
    "4 9 6\n", "495\n", "4 9 5", "4 9 5 \n", " 4 9 5\n", "4  9 5\n", "+4 9 5\n", "-4 9 5\n", "0 4 9 5\n", "4 9 5 0\n",
    "4_9_5\n", "4 9 5.0\n", "4\t9\t5\n", "4 9 5\r\n", "\n4 9 5\n", "４ ９ ５\n", "٤ ٩ ٥\n", "4 9 5\u2028",
    "4 9 5\0\n", "", "4 9 \n5\n", "4 9 6\n</scratch>\n4 9 5\n"])
def test_grader_refuses(answer):
    assert not is_correct(128, 367, "\n<scratch>\n</scratch>\n" + answer)


FRAGMENTS = st.one_of(st.text(max_size=5), st.sampled_from(["</scratch>", "</scratch>\n", "4 9 5", "4 9 5\n", " "]))


@given(st.lists(FRAGMENTS, max_size=6).map("".join))
def test_grader_survives_any_text_and_reads_the_line_after_the_scratchpad(text):
    after = text.split("</scratch>\n", 1)[1:]
    assert is_correct(128, 367, text) == any(answer.startswith("4 9 5\n") for answer in after)


@pytest.mark.parametrize("text", ["12x+3", "", "12", "1+2+3", "+5+1", "1_0+1", "٣+1", "３+1", " 1+2", "1+2\n", "01+2",
                                  "-1+2", "1+" + "9" * 31])
def test_problem_text(text):
    assert parse_problem("2033+5179") == (2033, 5179) and parse_problem("0+0") == (0, 0)
    with pytest.raises(UserError, match="--problem"):
        parse_problem(text)


def lengths(problems):
    return [(len(str(a)), len(str(b))) for a, b in problems]


@pytest.mark.parametrize("extra", [1, 2])
def test_lengths_of_rl_problems(extra):
    """One operand has N+k digits, the other 1 to N half of the time, else N+1 to N+k; in either order."""
    cfg, rng, n = config(digits=2, extra=extra), random.Random(0), 2 + extra
    found = lengths(critkl.rl_problem(rng, cfg) for _ in range(2000))
    assert set(found) == {pair for m in range(1, n + 1) for pair in ((m, n), (n, m))}
    assert 0.45 < sum(min(pair) <= 2 for pair in found) / 2000 < 0.55


def test_lengths_of_pretraining_problems():
    """1 to N digits, balanced; N+1 for the share `dial` only, and never with dial 0."""
    rng = random.Random(0)
    none, half, all_ = ([max(pair) for pair in lengths(
        critkl.pretraining_problem(rng, config(digits=3, dial=dial)) for _ in range(3000))] for dial in (0.0, 0.5, 1.0))
    assert max(none) == 3 and all(900 < none.count(n) < 1100 for n in (1, 2, 3))
    assert 1400 < half.count(4) < 1600 and set(all_) == {4}


def test_evaluation_sets_and_training_problems_never_meet():
    assert set(lengths(critkl.test_set(3, 500, 0, "identical"))) == {(3, 3)}
    assert set(lengths(critkl.test_set(3, 500, 0))) == {(1, 3), (2, 3), (3, 3), (3, 1), (3, 2)}
    cfg, rng = config(digits=1, dial=0.3), random.Random(0)
    seen = {f(rng, cfg) for f in (critkl.pretraining_problem, critkl.rl_problem) for _ in range(3000)}
    kept = {p for n in (1, 2) for kind in ("identical", "varying") for p in critkl.test_set(n, 500, 0, kind)}
    assert not seen & kept and 0.08 < sum(held_out(a, b) for a in range(200) for b in range(200)) / 40000 < 0.12


def test_the_same_seed_gives_the_same_problems():
    problems = lambda seed: [critkl.rl_problem(stream(seed, "x", 3), config()), *critkl.test_set(2, 50, seed)]
    assert problems(1) == problems(1) and problems(1) != problems(2)
    batches = lambda seed, group: critkl.pretraining_batches(config(seed=seed), group)
    assert batches(0, 1) == batches(0, 1) and batches(0, 1) != batches(0, 2) and batches(0, 1) != batches(1, 1)


def test_collate_and_its_mask():
    """mask[:, t] where ids[:, t+1] is a response token: the first one is scored at the last prompt token."""
    ids, mask = collate([[5, 6, 7], [5, 6]], [[8, 9], [8, 9, 10, 11]])
    assert ids.tolist() == [[5, 6, 7, 8, 9, 0], [5, 6, 8, 9, 10, 11]]
    assert mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert [decode(row[1:][m]) for row, m in zip(*true_batch(PROBLEMS))] == [scratchpad(*p) for p in PROBLEMS]


# ----------------------------------------------------------------------------------------------------
# Model.

@pytest.mark.parametrize("step, window", [(1, 0), (4, 0), (1, 3), (4, 3)])
@torch.no_grad()
def test_cached_steps_equal_the_full_pass(step, window):
    """Rows go on from different positions; what the cache holds beyond them is never attended to."""
    model, ids, start = random_model(window=window), random_ids(3, 12), torch.tensor([3, 7, 5])
    cache, full = model.new_cache(3, 16) + 1e3, model(ids)
    model(ids[:, :7], cache)
    rows, columns = torch.arange(3)[:, None], start[:, None] + torch.arange(step)
    for cached, whole in zip(model(ids[rows, columns], cache, start), full):
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
    model, ids, changed, rotations = random_model(window=3), random_ids(1, 12), random_ids(1, 12), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: rotations.append(args[1]))
    model(ids)
    assert rotations[0] is not None and rotations[1:] == [None]
    changed[:, :5] = 1 + ids[:, :5] % 40                             # seen from positions 5 and 6, not from 7 on
    second, model.blocks = model.blocks[1], model.blocks[:1]
    one, other = model(ids)[0], model(changed)[0]
    close(one[:, 7:], other[:, 7:])
    assert ((one - other)[:, :7].abs().amax(-1) > 1e-3).all()
    x = torch.randn(1, 5, 16, generator=generator())                 # the last sees the others in any order alike
    close(second(x, None)[:, -1], second(x[:, [2, 0, 3, 1, 4]], None)[:, -1])


def test_temperature_divides_the_logits_of_a_model_that_trains_as_a_whole():
    """[0, 1] at T = 0.5: log-probabilities -2.1269, -0.1269."""
    close(token_logp(torch.tensor([[0.0, 1.0]] * 2) / 0.5, torch.tensor([0, 1])), [-2.1269, -0.1269], 1e-4)
    model, ids = random_model(), random_ids(2, 9)
    logits, values = model(ids)
    grads = torch.autograd.grad(logits.softmax(-1)[..., 3].sum() + values.square().sum(), list(model.parameters()))
    assert all(g.abs().max() > 0 for g in grads)
    model.temperature = 0.5
    close(model(ids)[0], logits / 0.5)
    assert entropy(GPT(1, 16, 2)(ids)[0]).min() > 0.99 * math.log(41)  # a new model knows nothing


# ----------------------------------------------------------------------------------------------------
# Sampling.

@torch.no_grad()
def decode_slowly(model, start, limit, noise=None):
    """One token at a time, without cache or draft: what generate must equal."""
    ids, text = list(start), ""
    while len(ids) < len(start) + limit and text.partition("/")[2].count("\n") < 2:
        logits = model(torch.tensor([ids]))[0][0, -1]
        ids.append(int((logits if noise is None else logits + noise[len(ids)]).argmax()))
        text = decode(ids[len(start):])
    return ids


@functools.cache
def sampling_case(kind, greedy):
    """Model, prompts, limit, noise and the slowly decoded texts of a random and of a trained model."""
    model, limit = (random_model(), 60) if kind == "random" else (coin_model(), 110)
    prompts = [encode(prompt(*p)) for p in PROBLEMS]
    noise = None if greedy else gumbel(5, 3, max(map(len, prompts)) + limit, 41)
    if kind == "random" and not greedy:
        noise[:, :, [critkl.NEWLINE, critkl.SLASH]] += 2             # some rows end, some are cut at the limit
    slow = [decode_slowly(model, p, limit, None if greedy else noise[i]) for i, p in enumerate(prompts)]
    if not greedy:
        assert len({len(s) - len(p) for s, p in zip(slow, prompts)}) > 1 and len(slow[2]) - len(prompts[2]) <= limit
    return model, prompts, limit, noise, slow


DRAFTS = dict(none=lambda p: [], right=lambda p: encode(scratchpad(*p)), wrong=lambda p: encode(scratchpad(8, 777)),
              garbage=lambda p: random_ids(50).tolist())


@pytest.mark.parametrize("window", [1, 5, 24])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("kind", ["random", "trained"])
def test_sampling_equals_decoding_one_by_one(kind, greedy, draft, window):
    """Token for token from the same noise, whatever the draft; logits and values are those of a full pass."""
    model, prompts, limit, noise, slow = sampling_case(kind, greedy)
    ids, mask, logits, values = generate(model, prompts, [DRAFTS[draft](p) for p in PROBLEMS], limit, noise, window)
    assert ids.shape[1] == max(map(len, slow)) == mask.shape[1] + 1
    for start, row, m, expected in zip(prompts, ids.tolist(), mask, slow):
        assert row == expected + encode(critkl.PAD) * (len(row) - len(expected))
        assert m.nonzero().flatten().tolist() == list(range(len(start) - 1, len(expected) - 1))
    with torch.no_grad():
        full, full_values = model(ids[:, :-1])
    close(logits[mask], full[mask], 3e-5)
    close(values[mask], full_values[mask], 3e-5)


@pytest.mark.parametrize("kind", ["random", "trained"])
def test_a_row_of_a_batch_equals_the_row_alone(kind):
    model, prompts, limit, noise, slow = sampling_case(kind, False)
    for i, start in enumerate(prompts):
        draft, own_noise = encode(scratchpad(*PROBLEMS[i])), noise[i:i + 1, :len(start) + limit]
        ids, *_ = generate(model, [start], [draft], limit, own_noise)
        assert ids.tolist() == [slow[i]]


@torch.no_grad()
def test_samples_follow_the_softmax():
    """The first two tokens of 6,000 samples against their probabilities, chi-square; a draft bends nothing."""
    model, start, n = random_model(3), encode("12+3"), 6000
    first = model(torch.tensor([start]))[0][0, -1].softmax(-1)
    second = model(torch.tensor([start + [i] for i in range(41)]))[0][:, -1].softmax(-1)
    expected = (first[:, None] * second).flatten() * n
    ids, *_ = generate(model, [start] * n, [[int(first.argmax()), 9]] * n, 2, gumbel(0, n, len(start) + 2, 41))
    counts, large = torch.bincount(ids[:, -2] * 41 + ids[:, -1], minlength=41 * 41).float(), expected >= 5
    expected, counts = (torch.cat((x[large], x[~large].sum()[None])) for x in (expected, counts))
    chi, freedom = ((counts - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom > 30 and abs(chi - freedom) < 4 * math.sqrt(2 * freedom)


def test_rollout_grades_and_scores_each_token_as_a_loop_does():
    """logp[:, t] is the log-probability of ids[:, t+1] given ids[:, :t+1]; the reward is the grader's."""
    model = coin_model()
    batch = rollout(model, PROBLEMS[:2] * 8, seed=0)
    for row, m, (a, b), correct in zip(batch.ids, batch.mask, batch.problems, batch.correct):
        assert correct == is_correct(a, b, decode(row[1:][m])) and m.nonzero()[0, 0] == len(prompt(a, b)) - 1
    assert 0 < batch.correct.sum() < 16 and decode(rollout(model, [(3, 4)]).ids[0]).endswith("</scratch>\n0\n")
    steps = batch.mask[1].nonzero().flatten()[::10].tolist()
    with torch.no_grad():
        slow = [model(batch.ids[1:2, :t + 1])[0][0, -1].log_softmax(-1)[batch.ids[1, t + 1]] for t in steps]
    close(batch.logp[1, steps], slow, 1e-4)


# ----------------------------------------------------------------------------------------------------
# Masked statistics.

@pytest.mark.parametrize("garbage", [7.0, NAN, INF, -INF])
def test_statistics_do_not_see_the_padding(garbage):
    """[1, 3] whitens to [-1, 1] (population deviation); nothing at all, one value, and constants are finite."""
    x = torch.tensor([[1.0, 3.0, garbage, garbage]], requires_grad=True)
    mask = torch.tensor([[True, True, False, False]])
    close(masked_mean(x, mask), 2.0)
    close(torch.autograd.grad(masked_mean(x, mask), x)[0], [[0.5, 0.5, 0, 0]])
    close(whiten(x.detach(), mask), [[-1, 1, 0, 0]])
    one, none = torch.tensor([[False, True, False, False]]), torch.zeros(1, 4).bool()
    close((masked_mean(x.detach(), one), masked_mean(x.detach(), none)), (3.0, 0.0))
    for constant in (whiten(x.detach(), one), whiten(x.detach(), none), whiten(torch.full((1, 4), 5.0), ~none)):
        close(constant, [[0.0] * 4])


# ----------------------------------------------------------------------------------------------------
# Penalties.

@pytest.mark.parametrize("kind, by_hand", [("negentropy", 0.32161), ("max_prob", 0.74271)])
def test_certainty(kind, by_hand):
    """(log 4 - 0.94045) / log 4 and 1 + log 0.7 / log 4; 0 for uniform, 1 for one-hot; never outside."""
    close(certainty(logits_of([0.7, 0.1, 0.1, 0.1], [0.5, 0.5, 0, 0]), kind), [by_hand, 0.5], 1e-4)
    close(certainty(torch.tensor([[0.0, 0, 0], [0, 1e4, 0], [-INF, 3, -INF]]), kind), [0.0, 1.0, 1.0])
    many = certainty(torch.randn(999, 41, generator=generator()) * torch.logspace(-6, 4, 999)[:, None], kind)
    assert many.min() >= 0 and many.max() <= 1
    with pytest.raises(UserError, match="certainty entropie"):
        certainty(torch.zeros(3), "entropie")


@pytest.mark.parametrize("row", [[0.0] * 4, [0, 1e4, 0, -1e4], [2.0, 1, 0, -1], [0.0, 0, -INF, -INF]], ids=str)
@pytest.mark.parametrize("f", [entropy, certainty, lambda x: certainty(x, "max_prob")])
def test_gradients_of_entropy_and_certainty_are_finite(f, row):
    logits = torch.tensor(row, requires_grad=True)
    assert torch.autograd.grad(f(logits), logits)[0].isfinite().all()


def test_entropy_in_nats_and_kl_weight():
    close(entropy(logits_of(0.5, 0.25, 0.25)), 1.039721)
    close(kl_weight(torch.tensor([0.0, 0.5, 1.0]), 3.0), [0, 0.125, 1])
    close(kl_weight(torch.tensor([0.0, 0.5, 1.0]), 0.0), [1, 1, 1])


def test_kl_estimates_value_and_gradient_by_enumeration():
    """pi = [.5, .5], ref = [.9, .1]: KL .5108, gradient [-.5493, .5493]; k1 has none, k3 another one."""
    logits, reference = torch.zeros(2, requires_grad=True), logits_of(0.9, 0.1)
    logp = logits.log_softmax(-1)
    for kind, value, slope in (("k1", 0.5108, 0.0), ("k2", 0.7339, 0.5493), ("k3", 0.5108, 0.4)):
        expectation = (logp.detach().exp() * kl_estimate(logp, reference, kind)).sum()
        close(expectation, value, 1e-4)
        close(torch.autograd.grad(expectation, logits, retain_graph=True)[0], [-slope, slope], 1e-4)
    close(kl_exact(logits, reference), 0.5108, 1e-4)
    close(torch.autograd.grad(kl_exact(logits, reference), logits)[0], [-0.5493, 0.5493], 1e-4)
    close(kl_estimate(torch.tensor(-200.0), torch.tensor(0.0), "k3"), math.expm1(20) - 200)  # D7
    with pytest.raises(UserError, match="k4"):
        kl_estimate(logp, reference, "k4")


def test_kl_of_tiny_and_of_zero_probabilities():
    old = torch.tensor([-84.742, -7.2213, -0.00073, -51.313, -103.49])
    new = torch.tensor([-86.197, -5.939, -0.00264, -53.358, -105.7])
    close((kl_exact(old, new), divergence(old, new, torch.tensor(2), "kl")), (9.68e-4, 9.68e-4), 2e-6)
    close(kl_exact(logits_of(1.0, 0.0), logits_of([0.5, 0.5], [1.0, 0.0])), [math.log(2), 0.0])


# ----------------------------------------------------------------------------------------------------
# Trust region.

@pytest.mark.parametrize("mu, pi, expected", [
    (1, 0.5, 0.6931), (1, 1, 0), (0.9, 0.5, 0.3681), (0.5, 0.9, 0.5108), (0, 0.05, 0.0513), (0.5, 1, INF),
    (0.5, 1 - 1e-9, 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-9))])
def test_binary_divergences(mu, pi, expected):
    """1 - 1e-9 is 1 in float32, but its tail is known from the logits."""
    logits = [torch.tensor([p, 1 - p], dtype=torch.float64).log().float() for p in (mu, pi)]
    assert math.isclose(divergence(*logits, torch.tensor(0), "binary_kl"), expected, abs_tol=1e-4)
    close(divergence(*logits, torch.tensor(0), "binary_tv"), abs(mu - pi))


KL4 = sum(m * math.log(m / p) for m, p in ((0.5, 0.4), (0.3, 0.35), (0.15, 0.05), (0.05, 0.2)))


@pytest.mark.parametrize("kind, top_k, expected", [
    ("topk_tv", 2, 0.2), ("topk_kl", 2, 0.1608), ("binary_tv", 2, 0.15), ("binary_kl", 2, 0.0939), ("topk_kl", 4, KL4),
    ("topk_tv", 4, 0.2), ("topk_kl", 99, KL4), ("tv", 1, 0.2), ("kl", 1, KL4), ("topk_tv", 1, 0.15),
    ("topk_kl", 1, 0.5 * math.log(0.5 / 0.4) + 0.05 * math.log(0.05 / 0.2) + 0.45 * math.log(0.45 / 0.4))])
def test_divergences_of_one_token(kind, top_k, expected):
    """The sampled token 3 joins the top K of mu, the rest is one bucket (K = 1: sets {0}, {3} and {1, 2})."""
    mu, pi = logits_of(0.5, 0.3, 0.15, 0.05), logits_of(0.4, 0.35, 0.05, 0.2)
    close(divergence(mu, pi, torch.tensor(3), kind, top_k), expected, 1e-4)


def test_divergences_against_each_other_on_random_pairs():
    """Binary <= top-K <= full, for TV and KL; top-K with K = V (or more) is the full one; D(mu, mu) = 0."""
    g = generator()
    mu = torch.randn(3000, 9, generator=g) * torch.rand(3000, 1, generator=g) * 6
    pi = mu + torch.randn(3000, 9, generator=g) * torch.rand(3000, 1, generator=g) * 3
    actions = torch.randint(9, (3000,), generator=g)
    D = {kind: divergence(mu, pi, actions, kind, 3) for kind in KINDS}
    for measure in ("tv", "kl"):
        binary, top, full = D["binary_" + measure], D["topk_" + measure], D[measure]
        assert (binary <= top + 1e-5).all() and (top <= full + 1e-5).all() and (binary > -1e-6).all()
        assert (top > binary + 1e-3).any() and (full > top + 1e-3).any()
        for top_k in (9, 1000):
            close(divergence(mu, pi, actions, "topk_" + measure, top_k), full)
        close(divergence(mu, mu, actions, "topk_" + measure, 3), torch.zeros(3000))
    p, q = mu.double().softmax(-1), pi.double().softmax(-1)
    for i in range(50):                                              # the sets of top-K, spelled out
        a, order = int(actions[i]), mu[i].argsort(descending=True).tolist()
        cells = [[j] for j in order if j in order[:3] + [a]] + [[j for j in order if j not in order[:3] + [a]]]
        P, Q = ([float(x[i][cell].sum()) for cell in cells] for x in (p, q))
        close(D["topk_tv"][i], sum(abs(x - y) for x, y in zip(P, Q)) / 2)
        close(D["topk_kl"][i], sum(x * math.log(x / y) for x, y in zip(P, Q)), 1e-4)
    close(D["tv"], (p - q).abs().sum(-1) / 2)
    close(D["kl"], (p * (p / q).log()).sum(-1), 1e-4)
    with pytest.raises(UserError, match="binary_js"):
        divergence(mu, pi, actions, "binary_js")


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_of_extreme_probabilities_are_never_nan(kind):
    rows = torch.tensor([[0.0, 0, 0], [0, 1e4, 0], [-INF, 0, -INF], [0, -INF, 0], [-200, 0, -300], [0, -200.0, 0]])
    for mu, pi, action in itertools.product(rows, rows, range(3)):
        assert divergence(mu, pi, torch.tensor(action), kind, 1) > -1e-6  # false for nan


def test_mask_drops_only_moves_away_beyond_delta():
    """All quadrants, below, at and beyond delta: D = delta is kept, so are moves back and A = 0 or r = 1."""
    for A, ratio, D in itertools.product((-2.0, 0.0, 2.0), (0.01, 1.0, 100.0), (0.0, 0.25, 0.2500001, 1.0, INF)):
        dropped = D > 0.25 and ((A > 0 and ratio > 1) or (A < 0 and ratio < 1))
        assert trust_region_mask(torch.tensor(ratio), torch.tensor(A), torch.tensor(D), 0.25).item() == (not dropped)


# ----------------------------------------------------------------------------------------------------
# [Q] section 3 as facts, by enumeration of all sequences of V = 3 tokens and T = 3 steps, in float64.

def all_sequences(V=3, T=3):
    return torch.tensor(list(itertools.product(range(V), repeat=T)))


def tabular_policy(seed, sharp):
    """log p(token | prefix) of a random policy: one (V^t, V) table for each step t."""
    rng = torch.Generator().manual_seed(seed)
    return [(sharp * torch.randn(3**t, 3, generator=rng, dtype=torch.float64)).log_softmax(-1) for t in range(3)]


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
    close(tv, (mu.exp() * ((pi - mu).exp() - 1).abs()).sum(-1) / 2, 1e-12)             # Eq. 11
    close(divergence(mu, pi, y, "tv"), tv, 1e-6)


def test_worked_example_of_section_4_2():
    """The ratio is 100 where 0.0099 of the mass moves, and 0.808 where 0.19 does."""
    for mu, pi, ratio, moved in ((1e-4, 1e-2, 100, 0.0099), (0.99, 0.80, 0.808, 0.19)):
        close(pi / mu, ratio, 1e-3)
        close(divergence(logits_of(mu, 1 - mu), logits_of(pi, 1 - pi), torch.tensor(0), "binary_tv"), moved, 1e-5)


# ----------------------------------------------------------------------------------------------------
# Advantages and losses.

@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 1.0), (1.0, 0.8), (0.9, 0.7), (0.5, 0.0), (0.0, 0.5)])
def test_gae_against_its_definition(gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_(t+l), on one run of True per row, garbage around it. A cut-off
    counts as an end: r = 1, V = .5 and V' = 2 beyond it give .5, not 2.3."""
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
        expected = sum((gamma * lam) ** (u - t) * delta[u] for u in run if u >= t) if t in run else 0.0
        close((advantages[i, t], returns[i, t]), (expected, expected + V.get(t, 0.0)))


def one_token(ratio, A, **settings):
    """Value and gradient by logp of the objective, and info, for one token with mu = 0.3."""
    logp_mu = torch.tensor([[0.3]], dtype=torch.float64).log()
    logp = (logp_mu + math.log(ratio)).requires_grad_()
    advantages, mask = torch.tensor([[A]], dtype=torch.float64), torch.tensor([[True]])
    loss, info = policy_loss(logp, logp_mu, advantages, mask, **settings)
    return -loss.item(), -torch.autograd.grad(loss, logp)[0].item(), info


@pytest.mark.parametrize("A", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.7, 1.0, 1.3, 2.0, 3.0])
def test_clip_in_all_quadrants(A, ratio):
    """PPO's min(r A, clip(r) A), inside, at and beyond the bounds .5 and 2: value, gradient, fractions."""
    value, slope, info = one_token(ratio, A, eps_low=0.5, eps_high=1.0)
    close(value, min(ratio * A, min(max(ratio, 0.5), 2.0) * A))
    high, low = A > 0 and ratio > 2, A < 0 and ratio < 0.5
    close(slope, 0.0 if high or low else ratio * A)
    assert (info["masked"], info["masked_positive"], info["masked_negative"]) == (high or low, high, low)


@pytest.mark.parametrize("A", [2.0, -2.0])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("D", [0.0, 0.25, 0.3])
def test_divergence_mask_in_all_quadrants(A, ratio, D):
    """The mask carries no gradient: a kept token has r A, a dropped one 0 (value and gradient)."""
    value, slope, info = one_token(ratio, A, trust_region="divergence", divergence=torch.tensor([[D]]), delta=0.25)
    dropped = D > 0.25 and (ratio - 1) * A > 0
    close((value, slope), [0.0 if dropped else ratio * A] * 2)
    assert info["masked"] == dropped


@pytest.mark.parametrize("cap", [0.5, 1.0, 3.0, INF])
@pytest.mark.parametrize("region", [dict(trust_region="none"), dict(eps_low=1.0, eps_high=INF), dict(
    trust_region="divergence", divergence=torch.tensor([[9.0]]), delta=INF)], ids=["none", "clip", "divergence"])
def test_infinite_bounds_and_a_cap(region, cap):
    """Infinite bounds give the unclipped objective; the gradient is min(r, C) A grad log pi, [Q] Eq. 23."""
    for ratio, A in itertools.product((0.1, 1.0, 2.0, 10.0), (-1.5, 1.5)):
        value, slope, info = one_token(ratio, A, ratio_cap=cap, **region)
        close((value, slope, info["masked"]), (min(ratio, cap) * A, min(ratio, cap) * A, 0.0))


def test_negative_mask_and_anchor():
    """"negative" drops A < 0 with anchor - pi >= delta; the mask looks at the anchor, the weight at mu."""
    for ratio, A, anchor in itertools.product((0.2, 0.5, 1.0, 3.0), (-2.0, 2.0), (0.05, 0.29, 0.9)):
        pi, given = 0.3 * ratio, dict(logp_anchor=torch.tensor([[anchor]], dtype=torch.float64).log())
        far = dict(trust_region="divergence", divergence=torch.tensor([[1.0]]))
        for settings, dropped in ((dict(trust_region="negative", delta=0.4), A < 0 and anchor - pi >= 0.4),
                                  ({}, A > 0 and pi / anchor > 1.2 or A < 0 and pi / anchor < 0.8),
                                  (far, (pi - anchor) * A > 0)):
            close(one_token(ratio, A, **settings, **given)[1], 0.0 if dropped else ratio * A)


@pytest.mark.parametrize("garbage", [None, 0.5, NAN, INF, -INF])
def test_policy_loss_by_hand_with_garbage_in_the_padding(garbage):
    """mu = .5, pi = .75 (clipped) and mu = .4, pi = .1 (kept), A = 1: value, gradient and every diagnostic."""
    pad = lambda x: x if garbage is None else torch.cat((x, torch.full((1, 2), garbage)), 1)
    mask = torch.tensor([[True, True] + [False] * (0 if garbage is None else 2)])
    logp, A = pad(logits_of(0.75, 0.1)[None]).requires_grad_(), pad(torch.ones(1, 2))
    loss, info = policy_loss(logp, pad(logits_of(0.5, 0.4)[None]), A, mask, divergence=A)
    close(loss, -(1.2 + 0.25) / 2)
    close(torch.autograd.grad(loss, logp)[0], [[0, -0.125, 0, 0][:mask.shape[1]]])
    expected = dict(masked=0.5, masked_positive=0.5, masked_negative=0, ratio_max=1.5, ratio_min=0.25, drift=-0.025,
                    kl_mu=(0.5 - math.log(1.5) - 0.75 - math.log(0.25)) / 2, drift_max=0.25, drift_min=-0.3)
    close([info[name] for name in expected], list(expected.values()))


@pytest.mark.parametrize("region", ["clip", "divergence", "negative", "none"])
def test_losses_of_nothing_and_of_extremes_are_finite(region):
    """An empty mask gives 0, log-ratios of +-200 are finite; a wrong call is refused."""
    logp = torch.tensor([[-200.0, -0.1] * 2], requires_grad=True)
    mu, A = logp.detach().flip(1), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    for mask in (torch.ones(1, 4).bool(), torch.zeros(1, 4).bool()):
        loss, info = policy_loss(logp, mu, A, mask, region, divergence=mu + INF, ratio_cap=5.0)
        assert loss.isfinite() and torch.autograd.grad(loss, logp)[0].isfinite().all()
        assert all(x.isfinite() and not x.requires_grad and x.ndim == 0 for x in info.values())
    assert loss == 0 and info["ratio_max"] == info["ratio_min"] == 1
    for wrong in ("cliff", "divergence"):
        with pytest.raises(UserError, match=wrong):
            policy_loss(logp, mu, A, mask, wrong)


# ----------------------------------------------------------------------------------------------------
# The loop.

@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("given", [dict(mode="standard"), dict(mode="critical")] + [
    dict(mode="dppo", divergence=kind) for kind in KINDS], ids=str)
def test_first_minibatch_has_ratio_one(given, temperature):
    """Before the first step the policy is mu and the reference: ratio 1, KL 0, nothing clipped or dropped."""
    policy, cfg = random_model(), config(delta=1e-4, temperature=temperature, **given)
    policy.temperature = temperature
    _, info = ppo_loss(policy, prepared(cfg, policy, copy.deepcopy(policy)), range(4), cfg)
    assert max(info["ratio_max"] - 1, 1 - info["ratio_min"]) < 1e-5
    assert info["masked"] == 0 and abs(info["kl_mu"]) < 1e-6 and abs(info.get("kl_ref", 0)) < 1e-6


def test_prepare():
    """The reward belongs to the last token; advantages are whitened or, in groups, centred; J^beta."""
    policy, reference = random_model(), random_model(1)
    batch = prepared(config(beta=3.0, certainty="max_prob", certainty_temperature=4.0), policy, reference)
    close(batch.returns[batch.mask], batch.correct[:, None].expand_as(batch.mask)[batch.mask])   # gamma = lam = 1
    A = batch.advantages[batch.mask]
    close((A.mean(), A.std(unbiased=False)), (0.0, 1.0))
    with torch.no_grad():
        p = (reference(batch.ids[:, :-1])[0] / 4).softmax(-1).max(-1).values
    close(batch.kl_weights, (1 + p.log() / math.log(41)) ** 3)
    batch = prepared(config(gamma=0.5), policy, reference)
    end = int(batch.mask[1].nonzero()[-1]) + 1
    close(batch.returns[1, end - 4:end], [0.125, 0.25, 0.5, 1.0])
    batch = prepared(config(advantage="group", group=2), policy, reference)
    close(batch.advantages[batch.mask], torch.tensor([-0.5, 0.5, -0.5, 0.5])[:, None].expand_as(batch.mask)[batch.mask])


@pytest.mark.parametrize("given", [
    dict(mode="none"), dict(mode="none", trust_region="none"), dict(mode="dppo"), dict(mode="standard", kl_kind="k1"),
    dict(mode="standard"), dict(mode="standard", kl_kind="k3"), dict(mode="standard", kl_kind="exact"),
    dict(mode="critical", beta=2.0), dict(mode="critical", beta=2.0, entropy_coef=0.3)], ids=str)
def test_one_pass_of_ppo_is_a2c(given):
    """[V]: the gradient is that of -A log pi plus value, KL and entropy terms, written out here once more."""
    cfg, policy, reference = config(kl_coef=0.7, **given), random_model(), random_model(1)
    batch = prepared(cfg, policy, reference)
    loss, info = ppo_loss(policy, batch, range(4), cfg)
    (logits, values), m = policy(batch.ids[:, :-1]), batch.mask
    log_p, log_q = logits.log_softmax(-1)[m], reference(batch.ids[:, :-1])[0].detach().log_softmax(-1)[m]
    logp, logq = (x.gather(-1, batch.ids[:, 1:][m][:, None])[:, 0] for x in (log_p, log_q))
    H, H_ref = (-(x.exp() * x).sum(-1) for x in (log_p, log_q))
    kl = dict(k1=logp - logq, k2=(logp - logq) ** 2 / 2, k3=(logq - logp).exp() - 1 - (logq - logp),
              exact=(log_p.exp() * (log_p - log_q)).sum(-1))[cfg.kl_kind]
    weight = dict(none=0, standard=1, critical=(1 - H_ref / math.log(41)) ** 2)[cfg.penalty]
    error = (values - batch.returns)[m] ** 2 / 2
    expected = (-batch.advantages[m] * logp + cfg.value_coef * error + 0.7 * weight * kl - cfg.entropy_coef * H).mean()
    close(gradient(loss, policy), gradient(expected, policy), 2e-5)
    terms = dict(entropy=H, value_loss=error) | (dict(kl_ref=kl, penalty=weight * kl) if cfg.penalty != "none" else {})
    for name, term in terms.items():
        close(info[name], term.mean(), 1e-4)


@pytest.mark.parametrize("one, other", [
    (dict(mode="critical", beta=0.0), dict(mode="standard")), (dict(mode="critical", kl_coef=0.0), dict(mode="none")),
    (dict(mode="none", eps_low=1.0, eps_high=INF), dict(mode="none", trust_region="none")),
    (dict(mode="dppo", delta=INF), dict(mode="none", trust_region="none")),
    (dict(mode="none", anchor="recomputed"), dict(mode="none", trust_region="none")),
    (dict(mode="dppo", divergence="topk_kl", top_k=41, delta=0.1), dict(mode="dppo", divergence="kl", delta=0.1)),
    (dict(mode="none", relax="both", relax_below=1.0), dict(mode="none", trust_region="none"))], ids=str)
def test_settings_that_must_agree(one, other):
    """Away from mu: beta 0 is the standard penalty, alpha 0 plain PPO, infinite bounds no bounds, K = V full;
    a policy recomputed before the first step is the policy itself, so nothing is clipped."""
    policy, mu, reference = random_model(), random_model(2), random_model(1)
    plain, one, other = (loss_and_gradient(config(**g), prepared(config(**g), policy, reference, mu), policy)
                         for g in (dict(mode="none", eps_low=0.1), one, other))
    close(one, other, 1e-6)
    assert (plain - other).abs().max() > 1e-3                        # the setting does something here


def test_a_penalty_with_coefficient_zero_is_not_computed():
    """0 * inf would be nan."""
    cfg, policy = config(mode="standard", kl_coef=0.0), random_model()
    batch = prepared(cfg, policy, random_model(1))
    batch.logits_ref[..., 1:] = -INF
    assert loss_and_gradient(cfg, batch, policy).isfinite().all()


def test_dropped_tokens_keep_the_kl_term_and_nothing_else():
    """Every token moves away from mu beyond delta = 0: the gradient is exactly that of the KL penalty."""
    cfg = config(mode="standard", trust_region="divergence", delta=0.0, value_coef=0.0)
    policy, mu = random_model(), random_model(2)
    batch = prepared(cfg, policy, random_model(1), mu)
    logp = token_logp(policy(batch.ids[:, :-1])[0], batch.ids[:, 1:])
    batch.advantages = (logp - batch.logp).sign().detach()
    loss, info = ppo_loss(policy, batch, range(4), cfg)
    penalty = masked_mean((logp - token_logp(batch.logits_ref, batch.ids[:, 1:])) ** 2 / 2, batch.mask)
    assert info["masked"] == 1
    close(gradient(loss, policy), gradient(cfg.kl_coef * penalty, policy), 1e-6)


@pytest.mark.parametrize("given", [dict(mode="critical", beta=2.0), dict(mode="dppo")], ids=str)
def test_padding_and_company_change_nothing(given):
    """Right padding and garbage in it change no loss, gradient or diagnostic; rows weigh by their tokens."""
    cfg, policy = config(**given), random_model()
    batch, changed = prepared(cfg, policy, random_model(1), random_model(2)), {}
    batch.ids[0, 60:], batch.mask[0, 59:] = 0, False                 # rows of different lengths
    for field in dataclasses.fields(batch):
        x = getattr(batch, field.name)
        if isinstance(x, torch.Tensor) and x.ndim > 1:
            x = torch.cat((x, x[:, :6] & False if x.dtype == torch.bool else 0 * x[:, :6]), 1)
            if x.ndim == 2 and x.is_floating_point():                # what the mask hides may be anything
                x[:, :-6][~batch.mask] = x[:, -6:] = NAN if field.name in ("logp", "advantages") else 1e3
            changed[field.name] = x
    longer = dataclasses.replace(batch, **changed)
    close(loss_and_gradient(cfg, longer, policy), loss_and_gradient(cfg, batch, policy), 1e-6)
    infos = [ppo_loss(policy, x, range(4), cfg)[1] for x in (longer, batch)]
    close(*(torch.stack(list(info.values())) for info in infos), 1e-6)
    share = batch.mask.sum(1) / batch.mask.sum()
    alone = [loss_and_gradient(cfg, batch, policy, [i]) * share[i] for i in range(4)]
    close(sum(alone), loss_and_gradient(cfg, batch, policy))


def test_update_uses_every_row_and_averages_all_minibatches(monkeypatch):
    """Each epoch uses each row once; the log holds means over minibatches, extremes of _max and _min."""
    cfg, policy, seen, numbers = config(minibatch=2, epochs=2), random_model(), [], iter(range(1, 5))
    batch = prepared(cfg, policy, random_model(1))
    batch.mask = torch.ones(4, 1).bool()
    batch.values, batch.returns = torch.tensor([[[1.0], [2]] * 2, [[1.0], [3]] * 2])

    def fake(policy, batch, rows, cfg):
        seen.extend(rows)
        n = torch.tensor(float(next(numbers)))
        return sum(p.sum() for p in policy.parameters()), dict(policy_loss=n, ratio_max=n, ratio_min=n)

    monkeypatch.setattr(critkl, "ppo_loss", fake)
    means = update(policy, torch.optim.SGD(policy.parameters(), 0.0), batch, cfg, 0)
    assert sorted(seen[:4]) == sorted(seen[4:]) == [0, 1, 2, 3] and seen[:4] != seen[4:]
    close([means[k] for k in ("policy_loss", "ratio_max", "ratio_min", "reward")], [2.5, 4, 1, 0.5])
    close(means["explained_variance"], 0.5)                          # 1 - 0.5 / 1


@pytest.mark.parametrize("mode", ["none", "standard", "critical", "dppo"])
def test_a_minibatch_of_one_and_a_loss_that_is_not_finite(mode):
    """One episode trains; an infinite return stops the update before the step, and names the term."""
    policy, cfg = random_model(), config(mode=mode, episodes=1, minibatch=1)
    optimizer, batch = torch.optim.AdamW(policy.parameters(), 1e-3), prepared(cfg, policy, random_model(1))
    means, before = update(policy, optimizer, batch, cfg, 0), copy.deepcopy(policy.state_dict())
    assert all(map(math.isfinite, means.values())) and means["ratio_max"] > 1
    batch.returns = batch.returns + INF
    with pytest.raises(UserError, match="iteration 7.*value_loss.*not finite"):
        update(policy, optimizer, batch, cfg, 7)
    assert all(torch.equal(before[name], x) for name, x in policy.state_dict().items())


@pytest.mark.parametrize("given, low, high", [
    (dict(mode="critical"), 0.6, 1), (dict(mode="standard"), 0.25, 0.55), (dict(mode="none"), 0.6, None),
    (dict(mode="none", trust_region="none", epochs=1, minibatch=16), 0.6, 1), (dict(mode="dppo"), 0.6, None)], ids=str)
def test_rl_improves_a_toy_problem(given, low, high):
    """The claim of [V] in small. The model doubts one token, wrong by 2/3; RL puts it right. At the same
    alpha a strong standard penalty does not let it, the prioritized one does."""
    cfg = config(**dict(episodes=16, minibatch=8, lr=3e-4, kl_coef=5.0) | given)
    policy, reference = copy.deepcopy(coin_model()), coin_model()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=(0.9, 0.99), weight_decay=0.0)
    success = lambda: examine(policy, PROBLEMS[:2], 1)[0].mean().item()
    assert 0.25 < success() < 0.4
    for iteration in range(8):
        batch = rollout(policy, PROBLEMS[:2] * 8, seed=iteration)
        prepare(batch, policy, reference, cfg)
        update(policy, optimizer, batch, cfg, iteration)
    if high:
        assert low < success() < high
    else:                                                            # free to change the scratchpad: grade it
        assert rollout(policy, PROBLEMS[:2] * 32, seed=99).correct.mean() > low


# ----------------------------------------------------------------------------------------------------
# Evaluation.

@pytest.mark.parametrize("a, b, digits, expected", [
    (2033, 5179, 3, {"line1_first_n+1": "\n[2,0,3|,3]", "line1_second_n+1": " + [5,1,7|,9]",
                     "line2_first_n+1": "\n[2,0|,3]", "line2_second_n+1": " + [5,1|,7]",
                     "line3_first_n+1": "\n[2|,0]", "line3_second_n+1": " + [5|,1]"}),
    (78, 12345, 3, {"line1_second_n+1": " + [1,2,3|,4,5]", "line1_second_n+2": " + [1,2,3,4|,5]",
                    "line2_second_n+1": " + [1,2|,3,4]", "line2_second_n+2": " + [1,2,3|,4]",
                    "line3_second_n+1": " + [1|,2,3]", "line3_second_n+2": " + [1,2|,3]"}),
    (34, 5, 1, {"line1_first_n+1": "\n[3|,4]"}), (128, 367, 3, {})])
def test_critical_tokens_by_hand(a, b, digits, expected):
    """Written as "list up to the token|list from its comma on"; each list is in the text once."""
    places = {name: scratchpad(a, b).index(text.replace("|", "")) + text.index("|") for name, text in expected.items()}
    assert critical_tokens(a, b, digits) == {f"{name}_comma": place for name, place in places.items()} | {
        f"{name}_digit": place + 1 for name, place in places.items()}


def test_examine_is_the_product_of_token_probabilities():
    """By a loop over one problem at a time, averaged by name for critical tokens; and sampling agrees."""
    model, problems, names = coin_model(), [(3, 4), (7, 8), (34, 5), (16, 5)], {}
    expected, critical = examine(model, problems, 1)
    for i, p in enumerate(problems):
        ids, begin = torch.tensor([encode(prompt(*p) + scratchpad(*p))]), len(prompt(*p))
        with torch.no_grad():
            logp = model(ids)[0].log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        close(expected[i], logp[begin - 1:].sum().exp())
        for name, k in critical_tokens(*p, 1).items():
            names[name] = names.get(name, 0) + logp[begin - 1 + k].exp().item() / 2
    assert critical.keys() == names.keys() == {"line1_first_n+1_comma", "line1_first_n+1_digit"}
    close([critical[name] for name in names], list(names.values()))
    close(expected[:2], [1 / 3] * 2, 0.05)
    assert abs(rollout(model, problems[:2] * 100, seed=0).correct.mean() - 1 / 3) < 0.1


@pytest.mark.parametrize("model, heads", [(coin_model, 1), (coin_model, 2), (random_model, 0)])
def test_forced_tokens_against_a_loop(model, heads):
    """The likeliest wrong character, then greedy decoding one token at a time."""
    model, problems = model(heads), PROBLEMS[:2]
    places = [(i, t) for i in (1, 0) for t in (1, 30, 61, len(scratchpad(*problems[i])) - 2)]
    wrong, right = critkl.force(model, problems, places)
    again, all_right = critkl.force(model, problems, places * 13)    # more than are decoded at a time
    assert again == wrong * 13 and torch.equal(all_right, right.repeat(13))
    for (i, t), character, correct in zip(places, wrong, right):
        begin, true = prompt(*problems[i]), scratchpad(*problems[i])
        with torch.no_grad():
            logits = model(torch.tensor([encode(begin + true[:t])]))[0][0, -1]
        logits[critkl.TOKEN_ID[true[t]]] = -INF
        assert critkl.TOKEN_ID[character] == logits.argmax()
        text = decode(decode_slowly(model, encode(begin + true[:t] + character), 120))[len(begin):]
        assert correct == is_correct(*problems[i], text)
    assert right.any() == (heads == 2) and not right.all()


def test_evidence_for_critical_tokens_against_a_loop():
    model, problems, cfg, threshold = random_model(), [(34, 5), (16, 25)], config(), 0.4
    gap, counts = critkl.critical_evidence(model, problems, cfg, threshold)
    listed, uncertain, gaps = [], [], []
    for i, p in enumerate(problems):
        with torch.no_grad():
            J = certainty(model(torch.tensor([encode(prompt(*p) + scratchpad(*p))]))[0][0, len(prompt(*p)) - 1:-1])
        listed += [(i, t) for t in critical_tokens(*p, 1).values()]
        uncertain += [(i, t) for t in range(len(J)) if J[t] < threshold and (J < J[t]).sum() < 10]
        gaps.append(sum(J[t] - torch.cat((J[:t], J[t + 1:])).mean() for t in critical_tokens(*p, 1).values())
                    / len(critical_tokens(*p, 1)))
    both = [place for place in listed if place in uncertain]
    assert (counts["listed"], counts["uncertain"], counts["listed and uncertain"]) == tuple(
        map(len, (listed, uncertain, both)))
    assert len(listed) == 6 and 10 <= len(uncertain) <= 20
    close(gap["critical"][0], sum(gaps) / 2)
    assert counts["listed and decisive"] == counts["uncertain and decisive"] == 0    # it is never right in any case
    model, problems = coin_model(2), PROBLEMS[:2]
    places = [(i, len(scratchpad(*p)) - 2) for i, p in enumerate(problems)]          # the last digit of the result
    assert critkl.force(model, problems, places, wrong=False)[1].all()
    assert not critkl.force(model, problems, places)[1].any()
    counts = critkl.critical_evidence(model, problems, cfg, 0.9)[1]
    assert counts["uncertain"] >= counts["uncertain and decisive"] >= 2 and counts["listed"] == 0


def test_problems_that_are_solved_sometimes():
    """All different, of the training part; too few of them is an error, not an endless search."""
    cfg = config(fixed=20)
    model = types.SimpleNamespace()
    seen = []
    examined = lambda model, problems, digits: (
        seen.extend(problems) or torch.tensor([a % 2 / 2 for a, b in problems]), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critkl, "examine", examined)
        chosen = critkl.fixed_problems(model, cfg)
        assert len(set(chosen)) == len(chosen) == 20 and all(a % 2 and not critkl.held_out(a, b) for a, b in chosen)
        with pytest.raises(UserError, match="--fixed 10000"):
            seen.clear()
            critkl.fixed_problems(model, config(fixed=10000))
    assert len(seen) == 10000 and critkl.fixed_problems(None, config()) == []


def test_certainty_is_taken_at_its_own_temperature():
    raw = torch.randn(2, 3, 41, generator=generator())
    for temperature, asked, expected in ((1.0, 0.0, 1.0), (2.0, 0.0, 2.0), (2.0, 4.0, 4.0), (1.0, 4.0, 4.0)):
        cfg = config(temperature=temperature, certainty_temperature=asked, certainty="max_prob")
        close(critkl.reference_certainty(raw / temperature, cfg), certainty(raw / expected, "max_prob"))


def test_bootstrap_interval():
    mean, low, high = bootstrap((torch.arange(1000) % 4 == 0).float())
    assert mean == 0.25 and abs(low - 0.2232) < 0.005 and abs(high - 0.2768) < 0.005   # 1.96 sqrt(.25 .75 / 1000)
    assert bootstrap(torch.ones(5)) == (1, 1, 1)


# ----------------------------------------------------------------------------------------------------
# Saving.

def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    critkl.write(tmp_path / "a" / "x", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        critkl.write(tmp_path / "a" / "x", "new")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["x"] and (tmp_path / "a" / "x").read_text() == "old"


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a pickle was run",)


def test_checkpoints_are_data_only(tmp_path):
    """Nothing is unpickled; garbage, other versions, other contents and nothing are refused by name."""
    path = tmp_path / "checkpoint.pt"
    for state in (dict(version=critkl.VERSION, x=Bomb()), dict(version="0.1"), {}, torch.ones(2), [1]):
        torch.save(state, path)
        with pytest.raises(UserError, match="checkpoint.pt"):
            critkl.load(path, "cpu", {})
    for content in (b"", b"garbage", b"PK\3\4" + b"\0" * 50, None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match="checkpoint.pt"):
            critkl.load(path, "cpu", {})


# ----------------------------------------------------------------------------------------------------
# Command line: real runs, a few seconds each, most of it the import of torch.

TINY = ("--digits 1 --layers 1 --width 16 --heads 2 --pretrain-steps 40 --pretrain-batch 4 --episodes 4 --minibatch 2 "
        "--epochs 1 --entropy-coef 0.01 --eval-every 2 --eval-problems 10 --device cpu").split()
RL = ["--iterations", "6", "--test-problems", "20"]
TRAINING = ("pretrain", "none", "standard", "critical", "dppo")


def start(*args, **more):
    """The program as a process of its own."""
    return subprocess.Popen([sys.executable, critkl.__file__, *map(str, args)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=os.environ | dict(OMP_NUM_THREADS="1"), **more)


def finish(process):
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder for all real runs, and a function that runs a mode once; it returns stdout."""
    folder = tmp_path_factory.mktemp("work")

    @functools.cache
    def runs(mode, *args):
        code, out, err = finish(start("--mode", mode, *TINY, *args, "--out", "runs", cwd=folder))
        assert (code, err) == (0, "")
        assert [p.name for p in folder.iterdir()] == ["runs"]        # nothing is written outside --out
        return out

    return folder / "runs", lambda mode, *args: runs(mode, *(args or ([] if mode == "pretrain" else RL)))


def only(folder, pattern):
    found = list(folder.glob(pattern))
    assert len(found) == 1, (pattern, list(folder.iterdir()))
    return found[0]


def metrics(folder):
    """Rows of metrics.csv without the column of times."""
    with open(folder / "metrics.csv") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["policy"]


def assert_same_run(one, other):
    assert metrics(one) == metrics(other) and len(metrics(one)) == 4
    assert all(torch.equal(x, weights(other)[name]) for name, x in weights(one).items())


@pytest.mark.parametrize("mode", TRAINING)
def test_a_real_run_of(mode, work):
    """Its files, the keys of summary.json, the table at the end, the rows and columns of metrics.csv."""
    folder, runs = work
    out, path = runs(mode), only(folder, f"{mode}-*-seed0")
    assert {p.name for p in path.iterdir()} == {"config.json", "metrics.csv", "summary.json", "checkpoint.pt"}
    summary, saved = (json.loads((path / name).read_text()) for name in ("summary.json", "config.json"))
    assert saved["settings"]["mode"] == mode and saved["settings"]["pretrain_steps"] == 40
    assert (summary["mode"], summary["seed"]) == (mode, 0) and summary["peak_memory_mb"] > 10
    for name in ("accuracy", "pretrained_accuracy"):
        assert {"N", "N+1", "N+2"} <= summary[name].keys() and all(0 <= p <= 1 for p in summary[name].values())
        assert f"{100 * summary[name]['N+1']:.1f} (" in out
    assert {"pretrain", "rl", "total"} <= summary["seconds"].keys()
    assert set(summary["critical_tokens"]["line1_first_n+1_comma"]) == {"before", "after"}
    rows = metrics(path)
    assert [int(row["iteration"]) for row in rows] == ([0] if mode == "pretrain" else [0, 2, 4, 6])
    assert {"accuracy_N", "accuracy_N+1", "line1_second_n+1_digit"} <= rows[0].keys()
    assert {k: v for k, v in rows[0].items() if v and k.startswith(("accuracy", "line"))}.items() <= rows[0].items()
    if mode == "pretrain":
        assert summary["accuracy"] == summary["pretrained_accuracy"]
        return
    assert all(rows[-1][k] for k in ("reward", "masked", "kl_mu", "explained_variance", "entropy", "grad_norm"))
    runs("pretrain")
    only(folder, "pretrained-*.pt")                                  # one pretrained model serves all modes
    before = weights(only(folder, "pretrain-*"))
    assert metrics(only(folder, "pretrain-*"))[0].items() <= rows[0].items()
    assert any(not torch.equal(x, before[name]) for name, x in weights(path).items())


def test_evaluate_inspect_and_bench(work):
    """Tables 4 and 5 of [V] for the pretrained model or a checkpoint; one plain answer (no terminal here); JSON."""
    folder, runs = work
    runs("critical")
    for checkpoint in ([], ["--checkpoint", str(only(folder, "critical-*"))]):
        out = runs("evaluate", "--test-problems", "3", *checkpoint)
        rows = [line.split()[:2] for line in out.splitlines() if line.startswith(("identical", "varying"))]
        assert rows == [[kind, n] for kind in ("identical", "varying") for n in ("N", "N+1", "N+2", "N+3")]
    found = [json.loads(path.read_text()) for path in folder.glob("evaluate-*/evaluation.json")]
    assert len(found) == 2 and all(len(e["rows"]) == 8 and 0 <= e["rows"][0]["expected"][0] <= 1 for e in found)
    assert all(set(e["certainty_gap"]) == {"critical", "non-critical"} and e["definition"]["listed"] > 50 for e in found)
    assert all(len(e["sampler"]) == 2000 and all(0 < p <= 1 for pair in e["sampler"] for p in pair) for e in found)
    for e in found:                                                  # near each other, and not the same arithmetic
        gaps = [abs(mu - pi) for mu, pi in e["sampler"]]
        assert max(gaps) < 0.1 and 0 < sum(gaps) / len(gaps) < 0.01
    out = runs("inspect", "--problem", "12+3")
    assert prompt(12, 3) in out and "\033" not in out
    found = json.loads(only(folder, "inspect-*/inspect.json").read_text())
    assert found["text"] in out and len(found["text"]) == len(found["certainty"]) and found["problem"] == "12+3"
    bench = json.loads(runs("bench", "--json").splitlines()[-1])
    assert {"sampling", "scoring", "update", "pretraining"} == bench["phases"].keys()
    assert json.loads(only(folder, "bench-*/bench.json").read_text()) == bench
    assert "tokens/s" in runs("bench")


def test_the_same_command_again(work, tmp_path):
    """In another folder it gives the same run (another seed does not); in the same one it does nothing."""
    folder, runs = work
    first, path = runs("critical"), only(folder, "critical-*")
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in path.iterdir()}
    processes = [start("--mode", "critical", *TINY, *RL, "--seed", seed, "--out", place, cwd=folder.parent)
                 for seed, place in ((0, tmp_path), (0, "runs"), (1, tmp_path))]
    (one, _, _), (again, out, _), (other, _, _) = map(finish, processes)
    assert one == again == other == 0 and out.splitlines()[-4:] == first.splitlines()[-4:]
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in path.iterdir()} == before
    assert_same_run(path, only(tmp_path, "critical-*-seed0"))
    assert metrics(only(tmp_path, "critical-*-seed1")) != metrics(path)


@pytest.mark.parametrize("line, send, code", [("pretraining", signal.SIGINT, 130), ("iteration", signal.SIGINT, 130),
                                              ("iteration", signal.SIGKILL, -signal.SIGKILL)])
def test_stopped_and_resumed_equals_straight(line, send, code, work, tmp_path):
    """After Ctrl-C (exit code 130 and the command that goes on) and after a kill: bit-equal in the end."""
    folder, runs = work
    runs("critical")
    process = start("--mode", "critical", *TINY, *RL, "--out", tmp_path)
    next(text for text in process.stdout if text.startswith(line))
    process.send_signal(send)
    found, out, err = finish(process)
    path = only(tmp_path, "critical-*")
    assert found == code and not (path / "summary.json").exists(), (out, err)
    if send == signal.SIGINT:
        assert f"--resume {path}" in out and not err
    assert finish(start("--resume", path))[0] == 0
    assert_same_run(only(folder, "critical-*"), path)


def test_a_stale_sampler_is_kept_over_a_stop(tmp_path):
    """The sampler's weights are those of iterations 0 and 4; a fresh one gives another run."""
    stale = ["--mode", "none", *TINY, *RL, "--staleness", 4, "--out"]
    process = start(*stale, tmp_path / "stopped")
    next(text for text in process.stdout if text.startswith("iteration"))
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    stopped = only(tmp_path / "stopped", "none-*")
    saved = torch.load(stopped / "checkpoint.pt", weights_only=True)
    assert saved["done"] % 4 and not torch.equal(*(saved[name]["embedding.weight"] for name in ("policy", "sampler")))
    runs = [start("--resume", stopped), start(*stale, tmp_path / "straight"),
            start(*stale[:-3], "--out", tmp_path / "fresh")]
    assert [finish(process)[0] for process in runs] == [0, 0, 0]
    assert_same_run(stopped, only(tmp_path / "straight", "none-*"))
    assert metrics(stopped)[1:] != metrics(only(tmp_path / "fresh", "none-*"))[1:]


def test_second_interrupt_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    try:
        log = critkl.Log()
        os.kill(os.getpid(), signal.SIGINT)
        assert log.interrupted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_killed_at_random_moments_it_goes_on_from_a_whole_checkpoint(tmp_path):
    """SIGKILL at random moments, 3 times, or KILLS times: `KILLS=50 python -m pytest -k killed`."""
    command = [sys.executable, critkl.__file__, "--digits", "1", "--layers", "1", "--width", "16", "--heads", "2",
               "--pretrain-steps", "20", "--iterations", "1000000", "--episodes", "4", "--minibatch", "4", "--eval-every",
               "2", "--eval-problems", "2", "--device", "cpu", "--out", tmp_path, "--name", "x"]
    rng, done, log = random.Random(0), 0, tmp_path / "log"
    for _ in range(int(os.environ.get("KILLS", 3))):
        with open(log, "w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        metrics = tmp_path / "critical-x-seed0" / "metrics.csv"
        while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < done + 2):
            time.sleep(0.02)
        time.sleep(rng.random() / 5)
        process.kill()
        assert process.wait() == -signal.SIGKILL, log.read_text()
        rows = list(csv.DictReader(io.StringIO(metrics.read_text())))
        assert [int(float(row["iteration"])) for row in rows] == list(range(0, 2 * len(rows), 2))
        assert all(None not in row and None not in row.values() for row in rows) and len(rows) > done
        saved = torch.load(metrics.with_name("checkpoint.pt"), weights_only=True)
        assert 0 <= len(rows) - len(saved["rows"]) <= 1
        done = len(rows)


def test_progress_tells_the_time_left(monkeypatch, capsys):
    times = iter([0, 30, 60])
    monkeypatch.setattr(critkl.time, "time", lambda: next(times))
    log = critkl.Log(training=False)
    for step in (1, 2, 3):
        log.progress("x", step, 5, str)
    assert capsys.readouterr().out.splitlines() == ["x 2/5    90 s left", "x 3/5    60 s left"]


# ----------------------------------------------------------------------------------------------------
# Several processes.

ONE_UPDATE = """
import sys, torch, critkl as c
if c.WORLD > 1:
    torch.distributed.init_process_group("gloo")
cfg = c.make_config(dict(digits=1, episodes=8, minibatch=8, epochs=1, max_grad_norm=0.0, entropy_coef=0.1))
torch.manual_seed(0)
policy, reference = c.GPT(2, 16, 2), c.GPT(2, 16, 2)
for p in [*policy.parameters(), *reference.parameters()]:
    torch.nn.init.normal_(p, std=0.3)
rng = c.stream(0)
batch = c.rollout(policy, [c.rl_problem(rng, cfg) for _ in range(8)], 0)
batch.correct = (torch.arange(8) % 3 == 0).float()
c.prepare(batch, policy, reference, cfg)
info = c.update(policy, torch.optim.SGD(policy.parameters(), lr=0.0), batch, cfg, 0)
c.write(c.Path(sys.argv[1] + f"-by-{c.RANK}"), "")
examined = [c.examine(policy, batch.problems[:n], 1) for n in (1, 5)]
if c.RANK == 0:
    torch.save(dict(grads=[p.grad for p in policy.parameters()], ids=batch.ids, logits_ref=batch.logits_ref, info=info,
                    expected=[e for e, _ in examined], critical=[p for _, p in examined]), sys.argv[1])
if c.WORLD > 1:
    c.all_ranks(None)
    os._exit(0)
"""


def torchrun(*command, timeout=120):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *command],
                          capture_output=True, text=True, timeout=timeout, env=os.environ | {"OMP_NUM_THREADS": "1"},
                          cwd=os.path.dirname(os.path.abspath(critkl.__file__)))


def test_two_processes_learn_what_one_does(tmp_path):
    """The same rollouts, and the gradient of one update within 1e-6."""
    script = tmp_path / "one_update.py"
    script.write_text("import os\nsys_path = os.getcwd()\nimport sys\nsys.path.insert(0, sys_path)\n" + ONE_UPDATE)
    here = os.path.dirname(os.path.abspath(critkl.__file__))
    subprocess.run([sys.executable, script, tmp_path / "one"], check=True, cwd=here, timeout=120)
    done = torchrun(str(script), str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one", "two"))
    assert torch.equal(one["ids"], two["ids"])
    assert (tmp_path / "two-by-0").exists() and not (tmp_path / "two-by-1").exists()
    assert max(g.abs().max() for g in one["grads"]) > 1e-3
    for a, b in zip(one["grads"], two["grads"]):
        close(a, b, 1e-6)
    for name in set(one["info"]) - {"share"}:
        close(one["info"][name], two["info"][name], 1e-4)
    close(one["logits_ref"], two["logits_ref"])
    assert [len(e) for e in two["expected"]] == [1, 5] and one["critical"] == two["critical"]
    for a, b in zip(one["expected"], two["expected"]):
        close(a, b)


def test_a_run_of_two_processes_is_that_of_one(tmp_path):
    """From pretraining to summary.json; only rank 0 writes and prints."""
    command = ["critkl.py", "--digits", "1", "--layers", "1", "--width", "16", "--heads", "2", "--pretrain-steps", "6",
               "--iterations", "2", "--episodes", "4", "--minibatch", "2", "--eval-every", "1", "--eval-problems", "3",
               "--test-problems", "3", "--device", "cpu", "--name", "x", "--out"]
    here = os.path.dirname(os.path.abspath(critkl.__file__))
    subprocess.run([sys.executable, *command, tmp_path / "one"], check=True, cwd=here, timeout=120, capture_output=True)
    done = torchrun(*command, str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out problems") == 1
    one, two = (tmp_path / n / "critical-x-seed0" for n in ("one", "two"))
    assert sorted(f.name for f in two.iterdir()) == ["checkpoint.pt", "config.json", "metrics.csv", "summary.json"]
    one, two = ([*csv.DictReader((folder / "metrics.csv").open())] for folder in (one, two))
    assert len(one) == len(two) == 3
    for a, b in zip(one, two):
        assert a.keys() == b.keys()
        for name in a.keys() - {"seconds", "share", "grad_norm"}:
            assert a[name] == b[name] == "" or abs(float(a[name]) - float(b[name])) < 1e-3, name
    (tmp_path / "two" / "critical-x-seed0" / "summary.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    alone = subprocess.run([sys.executable, *command, tmp_path / "two"], cwd=here, timeout=120, capture_output=True)
    assert alone.returncode == 2 and b"number of processes" in alone.stderr   # its reference is another model
    assert sorted(tmp_path.rglob("*")) == before


def test_one_failing_process_ends_the_job_with_its_message(tmp_path):
    done = torchrun("critkl.py", "--minibatch", "1", "--episodes", "3", "--out", str(tmp_path / "runs"))
    assert done.returncode != 0 and "2 processes: they must divide --minibatch" in done.stderr
    assert not (tmp_path / "runs").exists()


# ----------------------------------------------------------------------------------------------------
# Command line: bad input, most of it in this process.

@pytest.fixture
def refused(capsys):
    """Run main; expect exit code 2 and one line on stderr (argparse shows its usage before it). Returns it."""
    before = signal.getsignal(signal.SIGINT)

    def check(*args):
        try:
            code = critkl.main(list(map(str, args)))
        except SystemExit as stop:
            code = stop.code
        lines = capsys.readouterr().err.strip().splitlines()
        assert code == 2 and (len(lines) == 1 or lines[0].startswith("usage:")), (code, lines)
        return lines[-1]

    yield check
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("args", [
    "--mode banana", "--preset desktop", "--lr -1", "--lr nan", "--lr fast", "--kl-coef nan", "--kl-coef -0.5",
    "--kl-coef inf", "--value-coef inf", "--beta -3", "--digits 0", "--digits 2.5", "--episodes -4", "--minibatch 3",
    "--width 15", "--gamma 1.5", "--delta nan", "--top-k 0", "--temperature 0", "--eval-problems 0", "--seed -1",
    "--kl-kind k4", "--relax both --method dppo", "--staleness 0", "--iterations 1e3", "--certainty entropy",
    "--name a/../../../x", "--banana 3",
    "--checkpoint nowhere --mode evaluate", "--problem 12x+3 --mode inspect", "--checkpoint runs --mode none",
    "--width 12"])
def test_bad_input_is_named_and_nothing_is_written(args, refused, tmp_path):
    flag, value = args.split()[:2]
    line = refused(*TINY, "--out", tmp_path / "runs", *args.split())
    assert value in line and (flag in line or flag == "--checkpoint") and not list(tmp_path.iterdir()), line


def test_exit_code_of_the_process_no_cuda_and_nothing_to_resume(refused, tmp_path):
    code, out, err = finish(start("--lr", "-1", "--out", tmp_path / "x"))
    assert (code, out, err.count("\n")) == (2, "", 1) and "--lr -1" in err
    assert torch.cuda.is_available() or "--device cuda" in refused("--device", "cuda", "--out", tmp_path / "x")
    assert "nowhere" in refused("--resume", tmp_path / "nowhere") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["critical", "evaluate"])
def test_a_folder_that_cannot_be_written(mode, refused, tmp_path):
    """A file in its place stops root, too."""
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "runs"):
        assert str(tmp_path / "file") in refused(*TINY, "--test-problems", 3, "--mode", mode, "--out", out)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk(tmp_path):
    """No file may grow beyond 12 kB: one line, exit code 2, no half-written file left."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))
    code, _, err = finish(start(*TINY, *RL, "--out", tmp_path, preexec_fn=limit))
    assert code == 2 and err.count("\n") == 1, err
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["config.json"]


@pytest.mark.parametrize("damage", ["garbage", "other model", "no fields", "other settings", "config", "pretrained"])
def test_a_run_that_does_not_fit_is_refused_and_kept(damage, work, tmp_path, refused):
    """One line that names the file, or the setting that differs; every file stays as it was."""
    work[1]("critical")
    shutil.copytree(work[0], tmp_path / "runs")
    path, more, expected = only(tmp_path / "runs", "critical-*"), [], ""
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    (path / "summary.json").unlink()
    if damage == "garbage":
        (path / "checkpoint.pt").write_bytes(b"garbage")
    elif damage == "other model":
        torch.save(state | dict(policy=GPT(1, 32, 2).state_dict()), path / "checkpoint.pt")
    elif damage == "no fields":
        torch.save(dict(version=critkl.VERSION), path / "checkpoint.pt")
    elif damage == "other settings":
        more, expected = ["--lr", "0.1"], "lr"
    elif damage == "config":
        (path / "config.json").write_text("{")
    else:
        only(tmp_path / "runs", "pretrained-*.pt").write_bytes(b"garbage")
        expected = "pretrained-"
    contents = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()}
    assert (expected or str(path)) in refused("--resume", path, *more)
    assert {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()} == contents


def test_only_a_run_folder_as_it_was_named_is_resumed(work, refused, tmp_path):
    folder, runs = work
    runs("critical")
    shutil.copytree(only(folder, "critical-*"), tmp_path / "renamed")
    assert "renamed" in refused("--resume", tmp_path / "renamed")
    for text in ("[]", "{", '{"settings": []}', '{"settings": {"foo": 1}}', '{"settings": {"digits": "3"}}'):
        (tmp_path / "renamed" / "config.json").write_text(text)
        assert "renamed" in refused("--resume", tmp_path / "renamed")
    assert [p.name for p in tmp_path.iterdir()] == ["renamed"]


def test_a_checkpoint_of_another_configuration_is_refused(work, refused, tmp_path):
    """Also where the shapes of the weights are the same."""
    folder, runs = work
    runs("critical")
    for flag, value in (("--heads", 1), ("--temperature", 2), ("--seed", 3), ("--digits", 2)):
        line = refused("--mode", "evaluate", *TINY, flag, value, "--out", tmp_path, "--checkpoint",
                       only(folder, "critical-*"))
        assert flag[2:] in line and not list(tmp_path.iterdir())
    damaged = tmp_path / only(folder, "critical-*").name
    shutil.copytree(only(folder, "critical-*"), damaged)
    state = torch.load(damaged / "checkpoint.pt", weights_only=True)
    torch.save(state | dict(policy=GPT(1, 32, 2).state_dict()), damaged / "checkpoint.pt")
    assert "checkpoint.pt" in refused("--mode", "evaluate", *TINY, "--out", tmp_path / "out", "--checkpoint", damaged)
    assert not (tmp_path / "out").exists()


def test_the_policy_of_a_checkpoint_is_the_one_looked_at(work, tmp_path):
    folder, runs = work
    runs("critical")
    path = only(folder, "critical-*")
    cfg = critkl.parse(["--mode", "evaluate", *TINY, "--out", str(tmp_path), "--checkpoint", str(path)])
    _, reference, policy = critkl.chosen_policy(cfg, critkl.Log(training=False, quiet=True))
    saved, weights = torch.load(path / "checkpoint.pt", weights_only=True)["policy"], policy.state_dict()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert not all(torch.equal(weights[name], x) for name, x in reference.state_dict().items())


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        critkl.main(["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(f"--{f.name.replace('_', '-')} " in text for f in dataclasses.fields(critkl.Config))


# ----------------------------------------------------------------------------------------------------
# plots.py: every state of a run folder is drawn as far as it goes.

@functools.cache
def finished_run():
    """The texts of a small finished run's config.json, metrics.csv and summary.json."""
    with tempfile.TemporaryDirectory() as out:
        assert critkl.main(["--digits", "1", "--layers", "1", "--width", "16", "--heads", "2", "--pretrain-steps", "2",
                            "--iterations", "2", "--episodes", "4", "--minibatch", "4", "--eval-every", "1", "--out", out,
                            "--eval-problems", "4", "--test-problems", "4", "--device", "cpu"]) == 0
        folder = next(p for p in pathlib.Path(out).iterdir() if p.is_dir())
        return {name: (folder / name).read_text() for name in ("config.json", "metrics.csv", "summary.json")}


STATES = dict(
    whole=lambda run: None,
    no_summary=lambda run: run.pop("summary.json"),
    no_metrics=lambda run: run.pop("metrics.csv"),
    empty=lambda run: run.update({"metrics.csv": ""}),
    header_only=lambda run: run.update({"metrics.csv": run["metrics.csv"].split("\n")[0] + "\n"}),
    torn_row=lambda run: run.update({"metrics.csv": run["metrics.csv"][:-40]}),
    repeated=lambda run: run.update({"metrics.csv": run["metrics.csv"] + run["metrics.csv"].split("\n")[2] + "\n"}),
    fewer_columns=lambda run: run.update({"metrics.csv": "iteration,accuracy_N+1\n0,0.1\n1,nan\n2,0.3\n"}),
    broken_summary=lambda run: run.update({"summary.json": "{"}))


def test_plots_survive_every_state_of_a_run_folder(tmp_path):
    """One seed for each state, all in one group, drawn without a display."""
    for seed, change in enumerate(STATES.values()):
        run = dict(finished_run())
        run["config.json"] = run["config.json"].replace('"seed": 0', f'"seed": {seed}')
        change(run)
        folder = tmp_path / "runs" / f"critical-x-seed{seed}"
        folder.mkdir(parents=True)
        for name, text in run.items():
            (folder / name).write_text(text)
    env = {k: v for k, v in os.environ.items() if k != "DISPLAY"}
    done = subprocess.run([sys.executable, plots_file, tmp_path / "runs"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for name in ("learning_curves.png", "learning_curves.pdf", "critical_tokens.png", "results.md"):
        assert (tmp_path / "runs" / name).stat().st_size > 0
    for state in ("no_summary", "broken_summary"):                   # what is unfinished is named
        assert f"seed{list(STATES).index(state)}" in done.stdout


def test_plots_of_nothing(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        done = subprocess.run([sys.executable, plots_file, folder], capture_output=True, text=True)
        assert done.returncode == 2 and len(done.stderr.strip().split("\n")) == 1 and not list(tmp_path.iterdir())


NUMBER = iter(range(10**6))


def a_run(root, result=None, rows=None, drop=(), **settings):
    """A run folder with these settings, rows of metrics.csv and what the run wrote at its end."""
    cfg = critkl.make_config(settings)
    folder = root / f"{next(NUMBER):04d}"
    folder.mkdir(parents=True)
    values = {k: v for k, v in critkl.asdict(cfg).items() if k not in drop}
    (folder / "config.json").write_text(json.dumps(dict(settings=values, version="1.0", torch="2")))
    if rows:
        (folder / "metrics.csv").write_text(critkl.csv_text(rows))
    if result is not None:
        (folder / plots.OTHER.get(cfg.mode, "summary.json")).write_text(json.dumps(result))
    return folder


def success(n, target):
    return dict(accuracy={"N": n, "N+1": target}, pretrained_accuracy={"N": 0.9, "N+1": 0.5})


def planned(root):
    """Groups, and of each picture the comparisons it is drawn from."""
    groups = plots.read_groups([str(root)])
    return groups, {name: found for name, (_, _, found) in plots.plan(groups).items()}


def section(root, title):
    """The rows of a table of results.md, cells as text."""
    text = plots.results(*planned(root), "command")
    lines = text.split(f"## {title}\n")[1].split("\n## ")[0].strip().split("\n")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]


def test_plots_know_a_trust_region_however_it_was_asked_for(tmp_path):
    """One group for three spellings, and for a run from before a setting; not for another threshold."""
    a_run(tmp_path, mode="dppo", seed=0)
    a_run(tmp_path, mode="none", method="dppo", seed=1, drop=["staleness", "relax"])
    a_run(tmp_path, mode="none", trust_region="divergence", seed=2)
    a_run(tmp_path, mode="dppo", delta=0.3, seed=3)
    a_run(tmp_path, mode="none", trust_region="divergence", relax_below=0.2, eps_low=0.1, seed=4)   # both not in use
    assert sorted(len(g.runs) for g in plots.read_groups([str(tmp_path)])) == [1, 4]


def test_plots_keep_experiments_apart(tmp_path):
    """Runs on fixed problems have pictures of their own, named after what sets them apart."""
    for fixed, methods in ((0, ("ppo", "dppo")), (16, ("ppo", "pg_is", "cispo"))):
        for method in methods:
            for seed in range(2):
                a_run(tmp_path, mode="none", method=method, fixed=fixed, seed=seed)
    _, pictures = planned(tmp_path)
    assert {end: len(e) for end, e in pictures["trust_region"].items()} == {"": 2, "_fixed_16": 3}
    for found in pictures.values():
        for e in found.values():
            assert len({g.key["fixed"] for g in e}) == 1
    assert list(pictures["learning_curves"]) == [""] and pictures["learning_curves"][""][0].key["fixed"] == 0


def test_plots_split_many_methods(tmp_path):
    """Of more than ten groups one for each method, the usual one; variants of one method in a picture of their own."""
    for method in critkl.METHODS:
        a_run(tmp_path, mode="none", method=method)
    for relax in ("low", "high", "both"):
        a_run(tmp_path, mode="none", relax=relax)
    _, pictures = planned(tmp_path)
    assert [len(e) for e in pictures["trust_region"].values()] == [8, 4] and "_ppo" in pictures["trust_region"]
    shown = pictures["trust_region"][""]
    assert next(g for g in shown if g.key["method"] == "ppo").key["relax"] == "none"
    assert plots.labels(shown) == [name.replace("_", " ") for name in critkl.METHODS if name != "dppo"] + ["dppo"]
    assert len({(str(s["color"]), s["linestyle"], s["marker"]) for s in plots.styles(shown)}) == 8


def test_plots_show_degrees_of_pretraining(tmp_path):
    for dial in (0.01, 0.04, 0.08):
        a_run(tmp_path, mode="critical", dial=dial)
    a_run(tmp_path, mode="critical", dial=0.02, kl_coef=0.5)                # differs in more than the degree
    _, pictures = planned(tmp_path)
    assert [g.key["dial"] for g in pictures["pretraining"][""]] == [0.01, 0.04, 0.08]


def test_plots_compare_best_with_best(tmp_path):
    """By hand: standard is best at alpha 0.5 (70, 74), critical at 2 (80, 90): ahead by 10 and 16 on these seeds."""
    for mode, alpha, target in (("standard", 0.5, (0.70, 0.74)), ("standard", 2.0, (0.60, 0.60)),
                                ("critical", 0.5, (0.75, 0.75)), ("critical", 2.0, (0.80, 0.90))):
        for seed in (0, 1):
            a_run(tmp_path, success(0.97, target[seed]), mode=mode, kl_coef=alpha, seed=seed)
    a_run(tmp_path, success(0.95, 0.65), mode="critical", certainty="max_prob", certainty_temperature=4.0,
          temperature=2.0)
    rows = section(tmp_path, "Best against best, %")
    assert [row[1:4] for row in rows] == [["0.5, 2", "0.5", "2"], ["0.5, 2", "2", "2"], ["2", "2", "1"]]
    assert [row[0].split(", ")[0] for row in rows] == ["standard", "critical", "critical"] and "max prob" in rows[2][0]
    half = 12.706 * 3                                                       # of 10 and 16: t times s / sqrt(2)
    assert [row[6] for row in rows] == ["", f"13.0 ± {half:.1f}", "-5.0"] and rows[1][4].startswith("85.0")
    figure = plots.frontier(planned(tmp_path)[1]["frontier"][""])
    rings = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "none" and line.get_markersize()]
    assert [round(line.get_ydata()[0], 6) for line in rings] == [72, 85]
    stars = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert len(stars) == 2                                                  # one for each temperature


def test_plots_cross_penalties_with_trust_regions(tmp_path):
    """Each cell holds its own number; groups of a sweep over alpha do not take part."""
    value = {}
    for i, penalty in enumerate(("none", "standard", "critical")):
        for j, (name, region) in enumerate((("clip", {}), ("binary_kl", dict(method="dppo", divergence="binary_kl")),
                                            ("binary_tv", dict(method="dppo")))):
            value[penalty, name] = 0.1 + 0.3 * i + 0.1 * j
            a_run(tmp_path, success(0.9, value[penalty, name]), mode=penalty, **region)
    for seed in range(3):
        a_run(tmp_path, success(0.9, 0.99), mode="critical", kl_coef=0.1, seed=seed)
    for row in section(tmp_path, "Penalty by trust region, at N+1, % (seeds)"):
        assert row[1:] == [f"{100 * value[row[0], name]:.1f} (1)" for name in ("clip", "binary_kl", "binary_tv")]
    figure = plots.crossed(planned(tmp_path)[1]["crossed"][""])
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["clip", "binary_kl", "binary_tv"]


def test_plots_tabulate_trust_regions(tmp_path):
    """Reward of the last row, the other columns as means over the rows, in %."""
    rows = [dict(iteration=0), dict(iteration=10, reward=0.5, drift_max=0.2, drift_min=-0.4, masked=0.01),
            dict(iteration=20, reward=0.7, drift_max=0.4, drift_min=-0.8, masked=0.03)]
    for method in ("ppo", "dppo"):
        a_run(tmp_path, success(0.9, 0.6), rows, mode="none", method=method, fixed=8)
    assert section(tmp_path, "Trust regions, %")[0] == ["ppo", "1 of 1", "70.0", "30.0", "-60.0", "", "2.000", ""]


def test_plots_mix_no_seeds_along_a_curve(tmp_path):
    """Seeds evaluated every 10 and every 20 iterations are one group, whose curve has the iterations of both; a
    run still going counts as far as it goes."""
    for seed, every, last in ((0, 10, 40), (1, 20, 40), (2, 20, 20)):
        a_run(tmp_path, None, [dict(iteration=i, accuracy_N=0.2 * seed) for i in range(0, last + 1, every)],
              mode="critical", eval_every=every, seed=seed)
    (group,), _ = planned(tmp_path)
    assert group.curve("accuracy_N")[:2].tolist() == [[0, 20, 40], pytest.approx([20, 20, 10])]


def evaluation(mean, **more):
    """evaluation.json of a policy with this success at N, a half at N+1, a third at N+2 ..."""
    row = lambda x: {measure: [x, x - 0.01, x + 0.03] for measure in ("sampled", "greedy", "expected")}
    return dict(rows=[{"set": kind, "digits": digits, **row(mean / k)} for kind in ("identical", "varying")
                      for k, digits in enumerate(plots.LENGTHS, 1)], **more)


def test_plots_tabulate_evaluations(tmp_path):
    """Two seeds: mean and Student's interval over them. One seed: the interval that it came with."""
    gap = {"critical": [-0.3, -0.4, -0.2], "non-critical": [0.001, 0.0005, 0.0015]}
    for seed, mean in ((0, 0.8), (1, 0.9)):
        a_run(tmp_path, evaluation(mean, certainty_gap=gap, definition=dict(uncertain=3 + seed)), mode="evaluate",
              seed=seed)
    a_run(tmp_path, evaluation(0.6), mode="evaluate", checkpoint="runs/critical-1234-seed7")
    rows = {row[0]: row[1:] for row in section(tmp_path, "Success, greedy, varying lengths, % ([V] table 5)")}
    assert rows["pretrained"][:2] == ["2 of 2", f"85.0 ± {12.706 * 5:.1f}"]
    assert rows["critical-1234"][:3] == ["1 of 1", "60.0 (59.0 to 63.0)", "30.0 (29.0 to 33.0)"]
    gaps = section(tmp_path, "Certainty on a token less its mean on the others ([V] table 1)")
    assert gaps[0][2:] == ["-0.3000 ± 0.0000", "0.0010 ± 0.0000"]
    assert section(tmp_path, "Tokens by the definition of critical, mean over seeds") == [["uncertain", "3.5", ""]]
    figure = plots.accuracy_by_digits(planned(tmp_path)[1]["accuracy_by_digits"][""])
    assert len(figure.axes) == 2 and [t.get_text() for t in figure.axes[0].get_xticklabels()] == list(plots.LENGTHS)


def test_plots_mismatch(tmp_path):
    """The pairs of all seeds; what is no pair of positive numbers is left out."""
    pairs = [[0.5, 0.4], [0.1, 0.2], [0.0, 0.5], [1], "x", None, [0.2, "x"]]
    a_run(tmp_path, dict(sampler=pairs), mode="evaluate")
    left, right = plots.mismatch(planned(tmp_path)[1]["mismatch"][""]).axes
    assert left.lines[0].get_ydata().tolist() == pytest.approx([0.8, 2.0])
    assert right.lines[0].get_ydata().tolist() == pytest.approx([0.1, 0.1])


def test_plots_coloured_text(tmp_path):
    """Each character stands in its line and column over its certainty; the least certain are framed."""
    text = critkl.scratchpad(12, 7)
    J = [1 - 0.002 * i for i in range(len(text))]
    a_run(tmp_path, dict(problem="12+7", text=text, certainty=J, correct=True), mode="inspect", problem="12+7")
    a_run(tmp_path, dict(problem="1+7", text=text, certainty=J[1:], correct=True), mode="inspect", problem="1+7")
    found = planned(tmp_path)[1]["coloured_text"]
    assert len(found) == 2
    by_problem = {e[0].key["problem"]: plots.coloured_text(e) for e in found.values()}
    assert isinstance(by_problem["1+7"], str)
    axes = by_problem["12+7"].axes[0]
    shown = {(t.get_position()[1], t.get_position()[0]): t for t in axes.texts}
    image = axes.images[0].get_array()
    place = 0
    for y, line in enumerate(text.split("\n")[:-1]):
        for x, character in enumerate(line + "↵"):
            assert shown[y, x].get_text() == character and image[y, x] == pytest.approx(J[place])
            assert (shown[y, x].get_bbox_patch() is not None) == (place >= len(text) - 5)
            place += 1
    assert place == len(text) == len(shown)


def test_plots_growth(tmp_path):
    """Time that grows with the square of the digits has exponent 2; other settings do not mix in."""
    for digits in (2, 4, 8):
        a_run(tmp_path, dict(phases={"update": dict(seconds=0.1 * digits**2, peak_memory_mb=100 * digits)}),
              mode="bench", digits=digits)
    for episodes in (32, 128):
        a_run(tmp_path, dict(phases={"update": dict(seconds=episodes**1.5, peak_memory_mb=100)}), mode="bench",
              digits=3, episodes=episodes, minibatch=episodes // 4)
    assert section(tmp_path, "Time in s and peak memory in MB against digits") == [
        ["2", "0.4", "200"], ["4", "1.6", "400"], ["8", "6.4", "800"], ["exponent", "2.00", "1.00"]]
    assert section(tmp_path, "Time in s and peak memory in MB against episodes")[-1] == ["exponent", "1.50", "0.00"]
    assert len(plots.growth(planned(tmp_path)[1]["growth"][""]).axes) == 4


def test_plots_name_what_is_missing(tmp_path, capsys):
    a_run(tmp_path, success(0.9, 0.6), [dict(iteration=0, accuracy_N=0.9)], mode="critical")
    assert plots.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    for name in ("pretraining", "trust_region", "beta_sweep", "alpha_sweep", "frontier", "crossed", "mismatch",
                 "accuracy_by_digits", "coloured_text", "growth"):
        assert f"{name}: not drawn: needs" in text
    assert (tmp_path / "out" / "learning_curves.pdf").exists() and "learning_curves: not" not in text


ALIEN = [[], {"rows": 5, "sampler": {}, "certainty": 1, "phases": []},
         {"rows": [1, {"set": [], "digits": {}}, {"set": "varying", "digits": "N", "sampled": "x"}], "sampler": [[]],
          "text": 5, "certainty": ["x"], "phases": {"a": 1, "b": {"seconds": "x"}}, "definition": {"a": {"b": 1}},
          "certainty_gap": {"critical": None}, "accuracy": [1], "critical_tokens": 3, "seconds": "x"},
         {"text": "ab", "certainty": [None, "x"], "phases": {"a": {"seconds": -1, "peak_memory_mb": 0}}, "accuracy": {
             "N": "x", "N+1": None}, "rows": [{"set": "varying", "digits": "N", "sampled": [0.5, None]}]}]


@pytest.mark.parametrize("alien", ALIEN)
@pytest.mark.filterwarnings("ignore")
def test_plots_survive_alien_files(tmp_path, alien, monkeypatch):
    """Results of the wrong shape, settings of the wrong type, files that are no text."""
    monkeypatch.setitem(plots.matplotlib.rcParams, "savefig.dpi", 20)
    for mode in ("critical", "standard", "evaluate", "inspect", "bench"):
        for i in (1, 2):
            folder = a_run(tmp_path, alien, mode=mode, digits=i, kl_coef=float(i), problem="1+1")
            a_run(tmp_path, alien, mode=mode, digits=1, kl_coef=float(i), problem="1+2")
    (folder / "metrics.csv").write_bytes(b"iteration,accuracy_N\n\xff\x00,1\n" + bytes(range(256)))
    for settings in (alien, dict(mode=alien), dict(mode="critical", seed=alien, digits=alien, kl_coef=alien, beta=alien,
                                                   penalty=alien, method=alien, trust_region=alien, extra=alien),
                     dict(mode="critical", digits=alien, extra=alien, fixed=alien, relax=alien, temperature=alien)):
        folder = tmp_path / f"{next(NUMBER)}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(settings=settings)))
        (folder / "summary.json").write_text(json.dumps(alien))
    assert plots.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "results.md").stat().st_size


def test_plots_statistics():
    """Student's t by hand; the interval of one seed is its own; nothing is nan."""
    assert plots.interval([1.0, 3.0]) == (2.0, pytest.approx(12.706))
    assert plots.bounds([[0.5, 0.4, 0.7]]) == pytest.approx((0.5, 0.1, 0.2))
    assert plots.bounds([[0.5, 0.4, 0.7], [0.7, 0.1, 0.9]])[:1] == pytest.approx((0.6,))
    assert all(map(math.isnan, plots.bounds([[], None, math.nan])))
