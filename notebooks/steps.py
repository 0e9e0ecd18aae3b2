"""The steps of critkl's course assignment: what is to be written and what is asked of it.

    python notebooks/grade.py --stubs       prints the functions to write
    python notebooks/grade.py FILE          grades a file

STEPS holds the steps, in any order, QUESTIONS what is answered in words, HUNT the bugs of the hunt. A case is
(expression, answer, hint). The answer is a value worked out by hand, or a Band it must lie in, or None: what
critkl's own functions give. The expressions see the functions of critkl and the names in HELPERS. Cases are
small enough to follow on paper, but for those of the training run.
"""
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import critkl
from critkl import certainty, gae, kl_estimate, kl_exact, kl_weight, masked_mean, policy_loss, token_logp, whiten


# ---- The two functions of the assignment that critkl.py does not have.

def prioritized_penalty(logp, logp_ref, logits_ref, mask, beta):
    """The prioritized KL penalty, [V] Eq. 1: masked mean of J^beta * k2, (B, T) log-probabilities of the
    sampled tokens under pi and ref, reference logits (B, T, V) and mask (B, T) to a scalar.

    J is the certainty of the reference. The reference is frozen: the only gradient is that by logp.
    """
    weight = kl_weight(certainty(logits_ref), beta).detach()
    return masked_mean(weight * kl_estimate(logp, logp_ref.detach(), "k2"), mask)


def learn(policy, reference, sample, iterations=25, epochs=6, lr=0.1, alpha=5.0, beta=10.0):
    """Train `policy` in place by PPO with the prioritized KL penalty; return the mean reward of each iteration.

    policy and reference map states (B, T) to logits (B, T, V) and values (B, T). An iteration calls
    sample(policy) once, for new episodes: states, actions, mask, rewards, (B, T) each. Their policy is mu.
    Advantages are those of `gae` with gamma = lambda = 1, whitened. Then come `epochs` steps of one Adam with
    learning rate `lr`, each on the whole batch. The loss is that of the clip (eps = 0.2), plus the masked mean
    of (values - returns)^2 / 2, plus alpha times the prioritized penalty. mu and ref do not change meanwhile.
    """
    optimizer, curve = torch.optim.Adam(policy.parameters(), lr), []
    for _ in range(iterations):
        states, actions, mask, rewards = sample(policy)
        with torch.no_grad():
            (logits, values), (logits_ref, _) = policy(states), reference(states)
        logp_mu, logp_ref = token_logp(logits, actions), token_logp(logits_ref, actions)
        advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
        advantages = whiten(advantages, mask)
        for _ in range(epochs):
            logits, values = policy(states)
            logp = token_logp(logits, actions)
            loss, _ = policy_loss(logp, logp_mu, advantages, mask)
            loss = loss + masked_mean((values - returns) ** 2, mask) / 2
            loss = loss + alpha * prioritized_penalty(logp, logp_ref, logits_ref, mask, beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append(rewards.sum(1).mean().item())
    return curve


def grad(f, x):
    """Gradient of sum f(x) by x; 0 where f does not depend on x."""
    x = x.clone().requires_grad_()
    y = f(x).sum()
    return torch.autograd.grad(y, x)[0] if y.requires_grad else torch.zeros_like(x)


def normal(seed, *shape):
    """Standard normal numbers, always the same ones for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- The task of the training run: a table in place of the model, with one critical token.

CRITICAL, FLAW = 2, 4    # positions
REFERENCE = torch.tensor([[.985, .005, .005, .005]]).repeat(6, 1)    # (T, V)
REFERENCE[CRITICAL], REFERENCE[FLAW] = torch.tensor([.15, .75, .05, .05]), torch.tensor([.97, .005, .005, .02])


class Table(torch.nn.Module):
    """A policy that knows its position alone: states (B, T) to logits (B, T, V) and values (B, T)."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(REFERENCE.log())
        self.values = torch.nn.Parameter(torch.zeros(len(REFERENCE)))

    def forward(self, states):
        return self.logits[states], self.values[states]


def episodes(policy, generator, B=128):
    """States, actions, mask and rewards, (B, T) each. The specification of the step says what is rewarded."""
    actions = torch.multinomial(policy.logits.detach().softmax(-1), B, True, generator=generator).T
    states = torch.arange(len(REFERENCE)).expand(B, -1)
    right = actions[:, CRITICAL] == 0
    mask = right[:, None] | (states <= CRITICAL)
    rewards = torch.zeros(B, len(REFERENCE))
    rewards[:, FLAW] = 0.5 * (right & (actions[:, FLAW] == 3))
    rewards[:, -1] = right & (torch.rand(B, generator=generator) < 0.75)
    return states, torch.where(mask, actions, 0), mask, rewards


def trained(learn, seed=0, **settings):
    """What came out of a training run, exact but for the reward."""
    policy, reference, generator = Table(), Table().requires_grad_(False), torch.Generator().manual_seed(seed)
    curve = learn(policy, reference, lambda policy: episodes(policy, generator), **settings) or [torch.nan]
    p, value = policy.logits.detach().softmax(-1), policy.values[0].detach()
    kl, success = kl_exact(p.log(), REFERENCE.log()), p[CRITICAL, 0]
    kl[CRITICAL] = 0
    return dict(success=success, kl=kl.max(), reward=sum(curve[-5:]) / len(curve[-5:]),
                value_error=(value - success * (0.75 + 0.5 * p[FLAW, 3])).abs())


HELPERS = dict(torch=torch, tensor=torch.tensor, grad=grad, normal=normal)      # and trained, see grade.py


# ---- Steps.

class Step(NamedTuple):
    points: int
    functions: list          # names, in critkl.py or here
    spec: str                # for the stubs and the notebook; their docstrings say the rest
    cases: list


class Band(NamedTuple):
    low: float
    high: float


HALF, NINE = "tensor([.5, .5]).log()", "tensor([.9, .1]).log()"      # log-probabilities are logits, too
AVERAGE = "grad(lambda x: x.softmax(-1).detach() * kl_estimate(x.log_softmax(-1), " + NINE + ", %r), " + HALF + ")"
MU, PI = "tensor([.5, .3, .15, .05]).log()", "tensor([.4, .35, .05, .2]).log()"
CLIP = "policy_loss(tensor([[%s]]).log(), torch.zeros(1, 1), tensor([[%s]]), tensor([[True]])%s)[0]"
TOKENS = "tensor([[1.5, .5, 1.5, .5]])"
PENALTY = ("prioritized_penalty(tensor([[-1., -2., 9.]]), tensor([[-1.5, -1., 0.]]), tensor([[[.9, .1], "
           "[.5, .5], [.9, .1]]]).log(), tensor([[True, True, False]]), %s)")

STEPS = {
    "certainty": Step(10, ["entropy", "certainty", "kl_weight"], """
The entropy H of a policy in nats, its certainty J, and the weight of the prioritized penalty.
J = (Hmax - H) / Hmax with Hmax = log V, [V] Eq. 2. The weight is J^beta, [V] Eq. 1.
The input is logits. Graded: kind negentropy.""", [
        ("entropy(tensor([.5, .25, .25]).log())", 1.0397, "H = -sum p log p with the natural logarithm (bits: 1.5)"),
        ("entropy(tensor([1., 0., 0.]).log())", 0, "a token of probability 0 adds 0; 0 * log 0 gives nan"),
        ("certainty(tensor([.5, .25, .25]).log())", 0.0536, "J = (Hmax - H) / Hmax, Hmax = log V, Eq. 2"),
        ("certainty(tensor([[1., 0.], [.5, .5]]).log())", [1, 0], "1 for one-hot, 0 for uniform, not the reverse"),
        ("certainty(tensor([[3., 1., 1.], [0., 0., 5.]]))", None, "the input is logits: take log_softmax first"),
        ("torch.stack([certainty(torch.zeros(v)) for v in range(2, 200)]).min() >= 0", True,
         "rounding puts a few J just below 0, and J^beta is then nan: clamp to [0, 1]"),
        ("kl_weight(tensor([0., .5, 1.]), 2)", [0, 0.25, 1], "the weight is J^beta"),
        ("kl_weight(tensor([.99, .9999]), 150)", [0.2215, 0.9851], "the weight is J^beta"),
        ("kl_weight(tensor([0., .5]), 0)", [1, 1], "beta = 0 is the standard penalty: every weight is 1"),
    ]),
    "kl": Step(15, ["kl_estimate", "kl_exact"], """
With r = pi / ref, where pi is the policy being trained and ref the frozen one ([V] section 4):
k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r, each from the sampled token alone;
and the exact KL(pi || ref) = sum pi log(pi / ref) over the vocabulary. Values and gradients are graded.""", [
        ("kl_estimate(tensor([.5]).log(), tensor([.9]).log(), 'k1')", [-0.5878], "log r with r = pi / ref"),
        ("kl_estimate(tensor([.5]).log(), tensor([.9]).log(), 'k2')", [0.1727], "k2 = (log r)^2 / 2"),
        ("kl_estimate(tensor([.5]).log(), tensor([.9]).log(), 'k3')", [0.2122], "k3 = 1/r - 1 + log r, r = pi / ref"),
        (f"kl_exact({HALF}, {NINE})", 0.5108, "KL(pi || ref) = sum pi log(pi / ref); KL(ref || pi) is .3681"),
        (f"kl_exact(tensor([1., 0.]).log(), {HALF})", 0.6931, "a token with pi = 0 adds 0; 0 * log 0 gives nan"),
        ("kl_exact(normal(0, 2, 3, 4), normal(1, 2, 3, 4))", None, "logits (B, T, V) in, log_softmax, sum over V"),
        (f"grad(lambda x: kl_exact(x, {NINE}), {HALF})", [-0.5493, 0.5493], "let the gradient through log pi and pi"),
        (AVERAGE % "k1", [0, 0], "in expectation over pi the gradient of k1 is 0"),
        (AVERAGE % "k2", [-0.5493, 0.5493], "in expectation over pi k2 has the gradient of KL: detach nothing"),
        (AVERAGE % "k3", [-0.4, 0.4], "in expectation over pi the gradient of k3 is that of KL(ref || pi)"),
    ]),
    "mean and whitening": Step(5, ["masked_mean", "whiten"], """
The mean over the response tokens of a padded batch, and advantages with mean 0 and variance 1 over them.
What lies outside the mask must not matter, even where it is nan.""", [
        ("masked_mean(tensor([[1., 2., 9.]]), tensor([[True, True, False]]))", 1.5, "sum and count inside the mask"),
        ("masked_mean(tensor([[1., 2., 3.], [10., 0., 0.]]), tensor([[True, True, True], [True, False, False]]))", 4,
         "one mean over all tokens, not the mean of the means of the rows"),
        ("masked_mean(tensor([[1., torch.nan]]), tensor([[True, False]]))", 1, "nan * 0 is nan: use torch.where"),
        ("masked_mean(tensor([[1., 2.]]), tensor([[False, False]]))", 0, "an empty mask gives 0, not 0 / 0"),
        ("grad(lambda x: masked_mean(x, tensor([[True, True, False]])), torch.ones(1, 3))", [[0.5, 0.5, 0]],
         "what is masked has no gradient"),
        ("whiten(tensor([[1., 3., 7., 7.]]), tensor([[True, True, False, False]]))", [[-1, 1, 0, 0]],
         "population variance (divide by n), over the mask only, and 0 outside"),
        ("whiten(tensor([[2., 2.]]), tensor([[True, True]]))", [[0, 0]], "constant input stays finite: add 1e-8"),
        ("whiten(normal(2, 2, 3), torch.ones(2, 3, dtype=torch.bool))", None, "over the whole batch, not row by row"),
    ]),
    "gae": Step(15, ["gae"], """
Generalized advantage estimation on padded episodes. With delta_t = r_t + gamma V_(t+1) - V_t it is
A_t = delta_t + gamma lambda A_(t+1), and the returns are A_t + V_t. After the last token of an episode
V and A are 0.""", [
        ("gae(tensor([[0., 0., 1.]]), tensor([[.5, .4, .3]]), torch.ones(1, 3) > 0, .9, .8)",
         [[[0.1293, 0.374, 0.7]], [[0.6293, 0.774, 1]]],
         "A_t = r_t + gamma V_(t+1) - V_t + gamma lambda A_(t+1); returns are A + V"),
        ("gae(tensor([[0., 2., 1.]]), tensor([[.5, .4, .3]]), torch.ones(1, 3) > 0, .9, 0.)[0]",
         [[-0.14, 1.87, 0.7]], "lambda = 0: A is r_t + gamma V_(t+1) - V_t; lambda is on A_(t+1) only"),
        ("gae(tensor([[0., 0., 1.]]), tensor([[.5, .4, .3]]), torch.ones(1, 3) > 0, 1., 1.)[0]", [[0.5, 0.6, 0.7]],
         "gamma = lambda = 1: A is the sum of the rewards to come less V"),
        ("gae(tensor([[1., 0.]]), tensor([[.5, 2.]]), tensor([[True, False]]), .9, 1.)[0]", [[0.5, 0]],
         "the episode ends with the mask: nothing after it is used (2.3 bootstraps from padding)"),
        ("gae(tensor([[7., 0., 1., 7.]]), tensor([[7., .5, .5, 7.]]), tensor([[False, True, True, False]]), 1., .5)",
         [[[0, 0.25, 0.5, 0]], [[0, 0.75, 1, 0]]], "advantages and returns are 0 outside the mask"),
        ("gae(normal(3, 2, 4), normal(4, 2, 4), tensor([[1, 1, 0, 0], [0, 1, 1, 1]]) > 0, .9, .8)", None,
         "rows end at different positions"),
    ]),
    "clip": Step(15, ["policy_loss"], """
PPO's objective, [Q] Eq. 10: min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = pi / mu, where mu is the
policy that sampled. The loss is minus its masked mean. Trust region none is r A without the clip.
Graded are trust_region clip and none, with numbers for eps; info may be {}, and divergence, delta, ratio_cap
and logp_anchor keep their defaults.""", [
        (CLIP % (0.5, 1., ""), -0.5, "r = pi / mu = exp(logp - logp_mu), and the loss is minus the objective"),
        (CLIP % (1.5, 1., ""), -1.2, "min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), Eq. 10"),
        (CLIP % (0.5, -1., ""), 0.8, "A < 0: the minimum takes the clipped term below 1 - eps_low"),
        (CLIP % (1.5, -1., ""), 1.5, "A < 0 and r > 1: the move back toward mu is not clipped"),
        (CLIP % (1.25, 1., ", 'clip', 0.2, 0.28"), -1.25, "the upper end is 1 + eps_high"),
        (CLIP % (0.75, -1., ", 'clip', 0.2, 0.28"), 0.8, "the lower end is 1 - eps_low"),
        (CLIP % (3., 1., ", 'none'"), -3, "trust region none: the objective is r A"),
        (f"grad(lambda x: policy_loss(x, torch.zeros(1, 4), tensor([[1., 1., -1., -1.]]), {TOKENS} > 0)[0], "
         f"{TOKENS}.log())", [[0, -0.125, 0.375, 0]], "gradient -r A / n where r is not clipped, else 0"),
        ("grad(lambda x: policy_loss(x, torch.zeros(1, 2), tensor([[1., -1.]]), torch.ones(1, 2) > 0, 'clip', .2, .28)"
         "[0], tensor([[1.25, .75]]).log())", [[-0.625, 0]], "each end has its own eps, in the gradient, too"),
        ("policy_loss(tensor([[0., 0., 5.]]), torch.zeros(1, 3), tensor([[1., 2., 9.]]), tensor([[True, True, "
         "False]]))[0]", -1.5, "the mean is over the mask: padding neither adds nor counts"),
        ("policy_loss(normal(5, 2, 4), normal(6, 2, 4), normal(7, 2, 4), normal(8, 2, 4) > 0)[0]", None,
         "minimum token by token, then one masked mean"),
    ]),
    "divergence": Step(15, ["divergence", "trust_region_mask"], """
The mask of DPPO, [Q] Eq. 12: a token is dropped where D(mu || pi) > delta and its update would move it further
away. D is a TV = 1/2 sum |mu - pi| or a KL = sum mu log(mu / pi): over two events, the sampled token or not
(Eq. 13, 14), over the top K of mu with the sampled token and one bucket for the rest (Eq. 15, 16), or over
the whole vocabulary.""", [
        (f"divergence({NINE}, {HALF}, tensor(0), 'binary_tv')", 0.4, "|mu(a) - pi(a)|, Eq. 13"),
        (f"divergence({NINE}, {HALF}, tensor(0), 'binary_kl')", 0.3681, "KL(mu || pi), Eq. 14; the other way .5108"),
        (f"divergence({MU}, {PI}, tensor(3), 'binary_kl')", 0.0939, "only two events: the sampled token, or not"),
        (f"divergence({MU}, {PI}, tensor(3), 'topk_tv', 2)", 0.2,
         "the top K of mu, also the sampled token, and one bucket for the rest; half of the sum"),
        (f"divergence({MU}, {PI}, tensor(3), 'topk_kl', 2)", 0.1608, "the same three tokens and the rest as one"),
        ("divergence(tensor([.5, .3, .15, .05]).log(), tensor([.05, .15, .3, .5]).log(), tensor(1), 'topk_tv', 1)",
         0.6, "the top K are those of mu, not of pi"),
        (f"divergence({MU}, {PI}, tensor(0), 'topk_tv', 9)", 0.2, "K > V counts as K = V"),
        (f"divergence({MU}, {PI}, tensor(0), 'tv')", 0.2, "half of sum |mu - pi|, Eq. 11"),
        (f"divergence({NINE}, {HALF}, tensor(0), 'kl')", 0.3681, "sum mu log(mu / pi)"),
        *((f"divergence(normal(9, 2, 3, 5), normal(10, 2, 3, 5), tensor([[0, 1, 2], [4, 3, 2]]), '{kind}', 2)", None,
           "logits (B, T, V) and actions (B, T)") for kind in ("binary_tv", "binary_kl", "topk_tv", "topk_kl")),
        (f"trust_region_mask({TOKENS}, tensor([[1., 1., -1., -1.]]), torch.ones(1, 4), .25)", [[0, 1, 1, 0]],
         "drop (0) moves away from mu only: A > 0 with r > 1, or A < 0 with r < 1; moves back are kept (1)"),
        (f"trust_region_mask({TOKENS}, tensor([[1., 1., -1., -1.]]), torch.full((1, 4), .25), .25)", [[1, 1, 1, 1]],
         "dropped is D > delta; D = delta is kept"),
        (f"trust_region_mask({TOKENS}, torch.zeros(1, 4), torch.ones(1, 4), .25)", [[1, 1, 1, 1]], "A = 0 is kept"),
    ]),
    "prioritized loss": Step(10, ["prioritized_penalty"], """
[V] Eq. 1 with the k2 estimator: the masked mean of J^beta (log pi - log ref)^2 / 2, where J is the certainty of
the reference at each token.""", [
        (PENALTY % 0, 0.3125, "beta = 0: the masked mean of k2 = (log r)^2 / 2, here of .125 and .5"),
        (PENALTY % 1, 0.0332, "mean of J * k2 over the mask: J = .531 and 0, k2 = .125 and .5"),
        (PENALTY % 2, 0.0176, "beta is the exponent of J alone: mean of J^2 * k2"),
        ("grad(lambda x: prioritized_penalty(x, torch.zeros(1, 2), tensor([[[.9, .1], [1., 0.]]]).log(), "
         "torch.ones(1, 2) > 0, 1), tensor([[-2., -1.]]))", [[-0.531, -0.5]], "the gradient is J^beta log r / n"),
        ("grad(lambda x: prioritized_penalty(tensor([[-2.]]), tensor([[-1.]]), x, tensor([[True]]), 2), "
         "tensor([[[1., 0.]]]))", [[[0, 0]]], "the weight carries no gradient: detach it"),
        ("grad(lambda x: prioritized_penalty(tensor([[-2.]]), x, torch.zeros(1, 1, 2), tensor([[True]]), 0), "
         "tensor([[-1.]]))", [[0]], "the reference is frozen: no gradient by logp_ref"),
        ("prioritized_penalty(normal(11, 2, 3), normal(12, 2, 3), 3 * normal(13, 2, 3, 5), normal(14, 2, 3) > -1, 3)",
         None, "each token has the weight of its own position"),
    ]),
    "training run": Step(15, ["learn"], """
The whole loop, with your other functions (while it is graded, they are critkl's). The policy is a table: for
each of 6 positions the logits of 4 tokens. Token 0 is right everywhere. The reference writes it with
probability 0.97 or more, except at position 2, the critical token: there 0.15, and any other token ends the
answer without reward. A finished answer is rewarded with 1 three times in four, by chance. The reward has a
flaw, 0.5 more for token 3 at position 4, where the reference is certain: the penalty must hold the policy
there, and let it go at the critical token. Graded is what comes out of a run with a fixed seed.
log pi of the actions is logits.log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1).""", [
        ("trained(learn)['success']", Band(.9, 1),
         "probability of the right critical token at the end; the reference has .15, the standard penalty gives .2"),
        ("trained(learn)['kl']", Band(0, .1),
         "largest KL(pi || ref) at the other positions: is the penalty added, and by the reference's certainty?"),
        ("trained(learn)['value_error']", Band(0, .25),
         "error of the value at position 0: train the values toward the returns; zero_grad before each backward"),
        ("trained(learn, iterations=1, epochs=50)['success']", Band(.2, .75),
         "many epochs on one batch: the clip against mu, fixed for the iteration, must stop them"),
        ("trained(learn)['reward']", Band(.65, .9), "mean of the last five numbers returned: rewards per episode"),
    ]),
}
FUNCTIONS = {name: globals().get(name) or getattr(critkl, name) for step in STEPS.values() for name in step.functions}


# ---- Open questions, graded by hand, and the bugs of the hunt.

class Question(NamedTuple):
    points: int
    text: str
    rubric: str


QUESTIONS = {
    "estimators": Question(4, """
k1 is an unbiased estimate of KL(pi || ref). Why does it not hold the policy when it is used as a loss? What does
k2 do in its place, and what changes when the samples come from an older policy mu?""", """
2: the expected gradient of k1 is 0, with the reason (the gradients of pi sum to 0). 1: k2 has the gradient of KL
in expectation. 1: with samples from mu both hold only near mu = pi, or need the weight pi / mu."""),
    "beta": Question(4, """
The paper takes beta = 150, your training run 10. Compute J and J^beta, for both exponents, for a policy over 41
tokens that gives one of them 0.999 and the others the rest in equal parts, and for one that gives two of them 0.6
and 0.4. Why is the exponent so large, and what goes wrong at 10000?""", """
2: J = 0.997 and 0.819; J^10 = 0.969 and 0.135; J^150 = 0.626 and 1e-13. 1: nearly all certainties lie close to 1,
and a small exponent leaves much weight on tokens somewhat below. 1: at 10000 even 0.997 has weight 0: no penalty."""),
    "trust region": Question(4, """
One token goes from mu = 0.0001 to pi = 0.01, another from 0.99 to 0.80. Which of the moves does the clip
(eps = 0.2) block, and which the TV mask (delta = 0.15)? What does this mean for a critical token whose right
continuation is rare under mu?""", """
2: with A of the sign that moves on, the clip blocks the first (ratio 100 > 1.2) and lets the second pass (0.81 >
0.8); the mask blocks the second alone (TV 0.0099 and 0.19). 2: under the clip the gradient of a rare right token
ends at 1.2 times its probability in each batch; under the mask it does not."""),
    "three penalties": Question(4, """
Run your `learn` with beta = 10, with beta = 0 and with alpha = 0, on five seeds or more: `from steps import
trained`, then `trained(learn, seed=1, beta=0.0)`. Give a table of the success at the critical token and of the
largest KL at the others, with their spread over seeds, and explain each row.""", """
2: a table with seeds and a spread, near 1 and 0.01 (beta = 10), 0.2 and 0.01 (beta = 0), 1 and 3.9
(alpha = 0). 2: the standard penalty holds the critical token, too; without one the policy follows the flaw."""),
    "silent bugs": Question(4, """
Name two mistakes in the loop of critkl.py that raise no error and leave a rising reward curve. For each: which
number in metrics.csv, or which test on a tiny batch, would show it?""", """
2 for each: the mistake is plausible and silent, and the number or the test would change because of it."""),
}
HUNT = {                     # bugs by step: a text that critkl.py holds once, and what takes its place
    "certainty": [("logp, 0)).sum(-1)", "logp, 0)).sum(-1) / math.log(2)"),
                  ("math.log(logits.shape[-1])", "math.log2(logits.shape[-1])")],
    "kl": [("def kl_exact(logits, logits_ref):", "def kl_exact(logits_ref, logits):"),
           ("return log_ratio ** 2 / 2", "return log_ratio ** 2")],
    "mean and whitening": [("x - masked_mean(x, mask)", "x - x.mean()"),
                           ("(mask, x, 0).sum() / mask.sum().clamp(min=1)", "(mask, x, 0).mean()")],
    "gae": [("gamma * lam * following", "gamma * following"),
            ("rewards[:, t] + gamma * next_value", "rewards[:, t] + gamma * lam * next_value")],
    "clip": [("(advantages < 0) & (moved < 1 - eps_low)", "(advantages < 0) & (moved > 1 + eps_high)"),
             ("(moved > 1 + eps_high)", "(moved > 1 + eps_low)")],
    "divergence": [("logs[0].topk(", "logs[1].topk("), ("outward & (divergence > delta)", "divergence > delta")],
}
