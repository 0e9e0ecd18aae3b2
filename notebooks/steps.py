"""The steps of critkl's course assignment: what is to be written and what is asked of it.

    python notebooks/grade.py --stubs       prints the functions to write
    python notebooks/grade.py FILE          grades a file

STEPS holds the steps, in any order, QUESTIONS what is answered in words, HUNT the bugs of the hunt.
A case is (expression, answer, hint). The answer is a value worked out by hand, or a Band it must
lie in, or None: what critkl's own functions give. The expressions see the functions of critkl and
the names in HELPERS. Cases are small enough to follow on paper, but for those of the training run.
"""
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import critkl
from critkl import (certainty, gae, kl_estimate, kl_exact, kl_weight, masked_mean, policy_loss,
                    token_logp, whiten)


# ---- The two functions of the assignment that critkl.py does not have.

def critical_penalty(logp, logp_ref, logits_ref, mask, beta):
    """The critical KL penalty, [V] Eq. 1: masked mean of J^beta * k2, a scalar.

    logp and logp_ref (B, T) are log-probabilities of the sampled tokens under pi and ref,
    logits_ref is (B, T, V), mask (B, T) bool. J is the certainty of the reference, which is frozen:
    the only gradient is that by logp.
    """
    with torch.no_grad():
        weight = kl_weight(certainty(logits_ref), beta)
    logp = torch.where(mask, logp, 0)
    logp_ref = torch.where(mask, logp_ref, 0).detach()
    return masked_mean(weight * kl_estimate(logp, logp_ref, "k2"), mask)


def learn(policy, reference, sample, iterations=25, epochs=6, lr=0.1, alpha=5.0, beta=10.0):
    """Train `policy` in place by PPO with the critical KL penalty; return the curve of rewards.

    policy and reference are modules that map states (B, T) to logits (B, T, V) and values (B, T).
    One Adam, with learning rate `lr` and else its defaults, serves the whole run. An iteration:
      1. calls sample(policy), once, for new episodes: states, actions, mask, rewards, (B, T) each;
      2. computes, without gradient and before any step, what stays fixed in it: the
         log-probabilities of the actions under the policy (mu) and the reference, advantages and
         returns (`gae` with gamma = lambda = 1, from the policy's values); whitens the advantages;
      3. takes `epochs` steps, each on the whole batch. The loss is `policy_loss` with eps 0.2, plus
         the masked mean of (values - returns)^2 / 2, plus alpha times `critical_penalty`.
    The curve is a list of `iterations` numbers: the rewards of the episodes of an iteration, summed
    over each episode, then averaged over the episodes.
    """
    optimizer = torch.optim.Adam(policy.parameters(), lr)
    curve = []
    for _ in range(iterations):
        states, actions, mask, rewards = sample(policy)
        with torch.no_grad():
            logits, values = policy(states)
            logits_ref, _ = reference(states)
        logp_mu, logp_ref = token_logp(logits, actions), token_logp(logits_ref, actions)
        advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
        advantages = whiten(advantages, mask)
        for _ in range(epochs):
            logits, values = policy(states)
            logp = token_logp(logits, actions)
            loss, _ = policy_loss(logp, logp_mu, advantages, mask)
            loss = loss + masked_mean((values - returns) ** 2, mask) / 2
            loss = loss + alpha * critical_penalty(logp, logp_ref, logits_ref, mask, beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append(rewards.sum(1).mean().item())
    return curve


# ---- What the expressions of the cases use.

def grad(f, x):
    """Gradient of sum f(x) by x; 0 where f does not depend on x."""
    x = x.clone().requires_grad_()
    y = f(x).sum()
    return torch.autograd.grad(y, x)[0] if y.requires_grad else torch.zeros_like(x)


def normal(seed, *shape):
    """Standard normal numbers in float32, always the same ones for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32)


# The task of the training run: a table in place of the model, with one critical token.
CRITICAL, FLAW = 2, 4    # positions
REFERENCE = torch.tensor([[.985, .005, .005, .005]]).repeat(6, 1)    # (T, V)
REFERENCE[CRITICAL] = torch.tensor([.15, .75, .05, .05])
REFERENCE[FLAW] = torch.tensor([.97, .005, .005, .02])


class Table(torch.nn.Module):
    """A policy that knows its position alone: states (B, T) to logits (B, T, V), values (B, T).

    With `tie` the values use the logits, so that all terms of a loss meet in the same parameters.
    """

    def __init__(self, logits=REFERENCE.log(), values=torch.zeros(len(REFERENCE)), tie=0.0):
        super().__init__()
        self.logits = torch.nn.Parameter(logits.clone())
        self.values = torch.nn.Parameter(values.clone())
        self.tie = tie

    def forward(self, states):
        logits = self.logits[states]
        return logits, self.values[states] + self.tie * logits[..., 0]


def episodes(policy, generator, B=128):
    """States, actions, mask and rewards, (B, T) each; the step's text says what is rewarded."""
    p = policy.logits.detach().softmax(-1)
    actions = torch.multinomial(p, B, True, generator=generator).T
    states = torch.arange(len(REFERENCE)).expand(B, -1).clone()
    right = actions[:, CRITICAL] == 0
    mask = right[:, None] | (states <= CRITICAL)
    paid = torch.rand(B, generator=generator, dtype=torch.float32) < 0.75
    rewards = torch.zeros(B, len(REFERENCE), dtype=torch.float32)
    rewards[:, FLAW] = 0.5 * (right & (actions[:, FLAW] == 3))
    rewards[:, -1] = right & paid
    return states, torch.where(mask, actions, 0), mask, rewards


def trained(learn, seed=0, **settings):
    """What came out of a training run, exact but for the reward."""
    policy, reference = Table(), Table().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    curve = learn(policy, reference, lambda policy: episodes(policy, generator), **settings)
    last = [float(reward) for reward in curve][-5:]
    p, value = policy.logits.detach().softmax(-1), policy.values[0].detach()
    success = p[CRITICAL, 0]
    kl = kl_exact(p.log(), REFERENCE.log())
    kl[CRITICAL] = 0
    return dict(success=success, kl=kl.max(), reward=sum(last) / len(last),
                value_error=(value - success * (0.75 + 0.5 * p[FLAW, 3])).abs())


def short(learn, tie=0.0, **settings):
    """A short training run that starts away from the reference: all that it leaves, to be compared
    with the same run of critkl's own `learn`."""
    policy = Table(REFERENCE.log() + normal(20, *REFERENCE.shape) / 2, normal(21, 6) / 4, tie)
    reference = Table(tie=tie).requires_grad_(False)
    generator, calls = torch.Generator().manual_seed(1), []

    def sample(policy):
        calls.append(1)
        return episodes(policy, generator)

    curve = learn(policy, reference, sample, **settings)
    return dict(curve=[float(reward) for reward in curve], values=policy.values,
                logp=policy.logits.log_softmax(-1), calls=len(calls))


HELPERS = dict(torch=torch, tensor=torch.tensor, nan=torch.nan, grad=grad, normal=normal,
               trained=trained, short=short)


# ---- Steps.

class Step(NamedTuple):
    points: int
    functions: list          # names, in critkl.py or here
    spec: str                # for the stubs and the notebook; their docstrings say the rest
    cases: list


class Band(NamedTuple):
    low: float
    high: float


# Stubs whose function has more arguments in critkl.py than its step asks for.
SHORTER = {
    "certainty": '''
def certainty(logits):
    """Certainty J of a policy, (..., V) to (...): (Hmax - H) / Hmax with Hmax = log V, in [0, 1].
    1 for one-hot, 0 for uniform."""
''',
    "policy_loss": '''
def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2):
    """PPO's loss: (B, T) log-probabilities under pi and mu, advantages and mask to (loss, info).
    loss is a scalar with a gradient by logp, info a dictionary of what you like to log, or {}."""
''',
}

# Log-probabilities are logits, too.
HALF, NINE = "tensor([.5, .5]).log()", "tensor([.9, .1]).log()"
AVERAGE = ("grad(lambda x: x.softmax(-1).detach() * kl_estimate(x.log_softmax(-1), " + NINE
           + ", %r), " + HALF + ")")
TWO_ROWS = "tensor([[1, 1, 1], [1, 0, 0]]) > 0"

CERTAINTY = Step(10, ["entropy", "certainty", "kl_weight"], """
The entropy H of a policy in nats, its certainty J, and the weight of the critical penalty. J =
(Hmax - H) / Hmax with Hmax = log V, [V] Eq. 2, and V counts all tokens, also those of
probability 0. The weight is J^beta, [V] Eq. 1, for any beta >= 0. The input is logits of any
size, also 1000. 0 log 0 is 0: a token with logit -inf adds nothing to H, nor to its gradient.
Rounding may put J outside [0, 1], and J^beta would be nan: clamp it to [0, 1].""", [
    ("entropy(tensor([.5, .25, .25]).log())", 1.0397,
     "H = -sum p log p with the natural logarithm (bits: 1.5)"),
    ("entropy(tensor([1., 0., 0.]).log())", 0,
     "a token of probability 0 adds 0; 0 * log 0 gives nan"),
    ("entropy(tensor([[1000., 0.], [1000., 1000.]]))", [0, 0.6931],
     "exp(1000) is inf: take log_softmax, not exp and a sum; (..., V) to (...)"),
    ("entropy(tensor([3., 0.]))", 0.1909, "the input is logits: take log_softmax first"),
    (f"grad(entropy, {NINE})", [-0.1978, 0.1978], "H has a gradient: detach nothing"),
    ("grad(entropy, tensor([.9, .1, 0.]).log())", [-0.1978, 0.1978, 0],
     "0 * log 0 gives nan in the gradient, too: take the -inf out before the product"),
    ("certainty(tensor([.5, .25, .25]).log())", 0.0536,
     "J = (Hmax - H) / Hmax, Hmax = log V, Eq. 2"),
    ("certainty(tensor([[1., 0.], [.5, .5]]).log())", [1, 0], "1 for one-hot, 0 for uniform"),
    ("certainty(tensor([.5, .5, 0.]).log())", 0.3691, "V counts tokens of probability 0, too"),
    ("certainty(tensor([[3., 1., 1.], [0., 0., 5.]]))", None, "(..., V) to (...), from logits"),
    ("certainty(tensor([1000., 0., 0.]))", 1, "exp(1000) is inf: take log_softmax"),
    ("torch.stack([kl_weight(certainty(torch.zeros(v)), 1.5) for v in range(2, 200)]).sum()", 0,
     "rounding puts a few J just below 0, and J^beta is then nan: clamp to [0, 1]"),
    ("kl_weight(tensor([0., .5, 1.]), 2)", [0, 0.25, 1], "the weight is J^beta"),
    ("kl_weight(tensor([.25, 0.]), 1.5)", [0.125, 0], "beta need not be a whole number"),
    ("kl_weight(tensor([.99, .9999]), 150)", [0.2215, 0.9851], "the weight is J^beta"),
    ("kl_weight(tensor([0., .5]), 0)", [1, 1],
     "beta = 0 is the standard penalty: all weights are 1"),
])

KL = Step(15, ["kl_estimate", "kl_exact"], """
With r = pi / ref, where pi is the policy being trained and ref the frozen one ([V] section 4):
k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r, each from the sampled token alone; and the
exact KL(pi || ref) = sum pi log(pi / ref) over the vocabulary. Values and gradients by pi are
graded: of the estimators for log-probabilities down to -500 and log-ratios from -12 to 12, of the
exact one for logits up to 1000. There a token with pi = 0 (logit -inf) adds 0, to the gradient as
well, and one with ref = 0 < pi gives inf.""", [
    ("kl_estimate(tensor([.5]).log(), tensor([.9]).log(), 'k1')", [-0.5878],
     "log r with r = pi / ref"),
    ("kl_estimate(tensor([.5]).log(), tensor([.9]).log(), 'k2')", [0.1727], "k2 = (log r)^2 / 2"),
    ("kl_estimate(tensor([.5]).log(), tensor([.9]).log(), 'k3')", [0.2122],
     "k3 = 1/r - 1 + log r, r = pi / ref"),
    ("kl_estimate(tensor([[-12., -.5]]), tensor([[-.5, -12.]]), 'k1')", [[-11.5, 11.5]],
     "no limit on log r up to 12"),
    ("kl_estimate(tensor([[-12., -.5]]), tensor([[-.5, -12.]]), 'k2')", [[66.125, 66.125]],
     "no limit on log r up to 12"),
    ("kl_estimate(tensor([[-12., -.5]]), tensor([[-.5, -12.]]), 'k3')", [[98703.2708, 10.5]],
     "no limit on log r up to 12"),
    ("kl_estimate(tensor([-500.]), tensor([-499.]), 'k2')", [0.5],
     "exp(-500) is 0: take the difference of the logarithms, not the ratio of exponentials"),
    (f"kl_exact({HALF}, {NINE})", 0.5108,
     "KL(pi || ref) = sum pi log(pi / ref); KL(ref || pi) is .3681"),
    (f"kl_exact(tensor([1., 0.]).log(), {HALF})", 0.6931,
     "a token with pi = 0 adds 0; 0 * log 0 gives nan"),
    ("kl_exact(tensor([1., 0.]).log(), tensor([1., 0.]).log())", 0, "also where ref is 0, too"),
    (f"kl_exact({HALF}, tensor([1., 0.]).log())", torch.inf,
     "what pi does and ref never does costs inf"),
    ("kl_exact(tensor([1000., 0.]), tensor([0., 1000.]))", 1000,
     "exp(1000) is inf: take log_softmax of the logits, and no limit on the log-ratio"),
    ("kl_exact(normal(0, 2, 3, 4), normal(1, 2, 3, 4))", None,
     "logits (B, T, V) in, log_softmax, sum over V"),
    (f"grad(lambda x: kl_exact(x, {NINE}), {HALF})", [-0.5493, 0.5493],
     "let the gradient through log pi and pi"),
    ("grad(lambda x: kl_exact(x, tensor([.6, .3, .1]).log()), tensor([.5, .5, 0.]).log())",
     [-0.1733, 0.1733, 0],
     "0 * log 0 gives nan in the gradient: take the -inf out before the product"),
    (AVERAGE % "k1", [0, 0], "in expectation over pi the gradient of k1 is 0"),
    (AVERAGE % "k2", [-0.5493, 0.5493], "in expectation over pi k2 has the gradient of KL"),
    (AVERAGE % "k3", [-0.4, 0.4],
     "in expectation over pi the gradient of k3 is that of KL(ref || pi)"),
    ("grad(lambda x: kl_estimate(x, tensor([0., 0.]), 'k1'), tensor([-12., 12.]))", [1, 1],
     "the gradient by log pi: detach nothing"),
    ("grad(lambda x: kl_estimate(x, tensor([0., 0.]), 'k2'), tensor([-12., 12.]))", [-12, 12],
     "the gradient by log pi: detach nothing, and no limit on log r up to 12"),
    ("grad(lambda x: kl_estimate(x, tensor([0., 0.]), 'k3'), tensor([-12., 12.]))",
     [-162753.7914, 1], "the gradient by log pi: detach nothing, and no limit on log r up to 12"),
])

MEAN = Step(5, ["masked_mean", "whiten"], """
The mean over the response tokens of a padded batch, and advantages with mean 0 and (population)
variance 1 over them, and 0 elsewhere. What lies outside the mask must not matter, not even
where it is nan, neither in the value nor in the gradient of the mean. The mean of nothing is 0.
A small constant (1e-8) keeps advantages that are all equal finite: they become 0.""", [
    ("masked_mean(tensor([[1., 2., 9.]]), tensor([[True, True, False]]))", 1.5,
     "sum and count inside the mask"),
    ("masked_mean(tensor([[0., 2., 9.]]), tensor([[True, True, False]]))", 1,
     "a 0 inside the mask counts, too"),
    (f"masked_mean(tensor([[1., 2., 3.], [10., 0., 0.]]), {TWO_ROWS})", 4,
     "one mean over all tokens, not the mean of the means of the rows"),
    ("masked_mean(tensor([[1., nan]]), tensor([[True, False]]))", 1,
     "nan * 0 is nan: use torch.where"),
    ("masked_mean(tensor([[1., 2.]]), tensor([[False, False]]))", 0,
     "an empty mask gives 0, not 0 / 0"),
    ("masked_mean(tensor([-2., 1., 5.]), tensor([True, True, True]))", 1.3333,
     "any shape, any sign"),
    ("grad(lambda x: masked_mean(x, tensor([[True, True, False]])), tensor([[1., 1., nan]]))",
     [[0.5, 0.5, 0]], "what is masked has no gradient"),
    ("whiten(tensor([[1., 3., 7., 7.]]), tensor([[True, True, False, False]]))", [[-1, 1, 0, 0]],
     "population variance (divide by n), over the mask only, and 0 outside"),
    ("whiten(tensor([[1., 3., nan]]), tensor([[True, True, False]]))", [[-1, 1, 0]],
     "nan * 0 is nan: use torch.where"),
    (f"whiten(tensor([[1., 3., 5.], [9., 0., 0.]]), {TWO_ROWS})",
     [[-1.1832, -0.5071, 0.169], [1.5213, 0, 0]], "one mean and one variance over all tokens"),
    ("whiten(tensor([[2., 2.]]), tensor([[True, True]]))", [[0, 0]],
     "constant input stays finite: add 1e-8"),
    ("whiten(tensor([[5., 1.]]), tensor([[True, False]]))", [[0, 0]],
     "the variance of one number is 0"),
    ("whiten(normal(2, 2, 3), torch.ones(2, 3) > 0)", None, "over the whole batch, not row by row"),
    ("whiten(100 * normal(2, 2, 3), torch.ones(2, 3) > 0)", None, "any scale becomes variance 1"),
])

GAE = Step(15, ["gae"], """
Generalized advantage estimation on padded episodes. With delta_t = r_t + gamma V_(t+1) - V_t it
is A_t = delta_t + gamma lambda A_(t+1), and the returns are A_t + V_t. After the last token of
an episode V and A are 0. In each row the mask is one run of True, or empty; outside it
advantages and returns are 0 and rewards and values may be anything, even nan.""", [
    ("gae(tensor([[0., 0., 1.]]), tensor([[.5, .4, .3]]), torch.ones(1, 3) > 0, .9, .8)",
     [[[0.1293, 0.374, 0.7]], [[0.6293, 0.774, 1]]],
     "A_t = r_t + gamma V_(t+1) - V_t + gamma lambda A_(t+1); returns are A + V"),
    ("gae(tensor([[0., 2., 1.]]), tensor([[.5, .4, .3]]), torch.ones(1, 3) > 0, .9, 0.)[0]",
     [[-0.14, 1.87, 0.7]], "lambda = 0: A is r_t + gamma V_(t+1) - V_t; lambda is on A_(t+1) only"),
    ("gae(tensor([[0., 0., 1.]]), tensor([[.5, .4, .3]]), torch.ones(1, 3) > 0, 1., 1.)[0]",
     [[0.5, 0.6, 0.7]], "gamma = lambda = 1: A is the sum of the rewards to come less V"),
    ("gae(tensor([[1., 0.]]), tensor([[.5, 2.]]), tensor([[True, False]]), .9, 1.)[0]", [[0.5, 0]],
     "the episode ends with the mask: nothing after it is used (2.3 bootstraps from padding)"),
    ("gae(tensor([[7., 0., 1., 7.]]), tensor([[7., .5, .5, 7.]]), tensor([[0, 1, 1, 0]]) > 0, "
     "1., .5)",
     [[[0, 0.25, 0.5, 0]], [[0, 0.75, 1, 0]]], "advantages and returns are 0 outside the mask"),
    ("gae(tensor([[1., 1., nan]]), tensor([[.5, .5, nan]]), tensor([[1, 1, 0]]) > 0, 1., 1.)",
     [[[1.5, 0.5, 0]], [[2, 1, 0]]], "nan * 0 is nan: use torch.where"),
    ("gae(tensor([[2.], [3.]]), tensor([[.5], [7.]]), tensor([[True], [False]]), .9, .8)",
     [[[1.5], [0]], [[2], [0]]], "one position, and a row without any"),
    ("gae(normal(3, 2, 4), normal(4, 2, 4), tensor([[1, 1, 0, 0], [0, 1, 1, 1]]) > 0, .9, .8)",
     None, "rows end at different positions"),
    ("gae(normal(5, 3, 7), normal(6, 3, 7), torch.arange(7) < tensor([[7], [4], [1]]), .5, .3)",
     None, "rows end at different positions"),
])

CLIP_CASE = ("policy_loss(tensor([[%s]]).log(), torch.zeros(1, 1), tensor([[%s]]), "
             "tensor([[True]])%s)[0]")
TOKENS = "tensor([[1.5, .5, 1.5, .5]])"
SIGNS = "tensor([[1., 1., -1., -1.]])"
UNEQUAL = ", eps_low=.2, eps_high=.28"

CLIP = Step(15, ["policy_loss"], """
PPO's objective, [Q] Eq. 10: min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = pi / mu,
where mu is the policy that sampled. The loss is minus its masked mean, with no other limit on r
(graded up to 1000, with log-probabilities down to -500). What lies outside the mask must not
matter, not even where it is nan, neither to the loss nor to its gradient. Return the loss and a
dictionary, which may be empty.""", [
    (CLIP_CASE % (0.5, 1., ""), -0.5,
     "r = pi / mu = exp(logp - logp_mu); the loss is minus the objective; it comes first of two"),
    (CLIP_CASE % (1.5, 1., ""), -1.2, "min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), Eq. 10"),
    (CLIP_CASE % (0.5, -1., ""), 0.8,
     "A < 0: the minimum takes the clipped term below 1 - eps_low"),
    (CLIP_CASE % (1.5, -1., ""), 1.5, "A < 0 and r > 1: the move back toward mu is not clipped"),
    (CLIP_CASE % (1.1, 5., ""), -5.5, "clipped is r, not r A"),
    (CLIP_CASE % (10., -1., ""), 10, "A < 0 and r > 1 is not limited at all"),
    (CLIP_CASE % (1000., -1., ""), 1000, "A < 0 and r > 1 is not limited at all"),
    ("policy_loss(tensor([[-500.]]), tensor([[-500.]]), tensor([[3.]]), tensor([[True]]))[0]", -3,
     "exp(-500) is 0: take exp of the difference of the logarithms"),
    (CLIP_CASE % (0.01, 1., ""), -0.01, "A > 0 and r < 1 is not limited at all"),
    (CLIP_CASE % (1.25, 1., UNEQUAL), -1.25, "the upper end is 1 + eps_high"),
    (CLIP_CASE % (1.5, 1., UNEQUAL), -1.28, "the upper end is 1 + eps_high"),
    (CLIP_CASE % (0.75, -1., UNEQUAL), 0.8, "the lower end is 1 - eps_low"),
    (CLIP_CASE % (0.6, -1., ", eps_low=.3, eps_high=.1"), 0.7, "the lower end is 1 - eps_low"),
    (f"grad(lambda x: policy_loss(x, torch.zeros(1, 4), {SIGNS}, {TOKENS} > 0)[0], {TOKENS}.log())",
     [[0, -0.125, 0.375, 0]], "gradient -r A / n where r is not clipped, else 0"),
    ("grad(lambda x: policy_loss(x, torch.zeros(1, 2), tensor([[1., -1.]]), torch.ones(1, 2) > 0"
     f"{UNEQUAL})[0], tensor([[1.25, .75]]).log())", [[-0.625, 0]],
     "each end has its own eps, in the gradient, too"),
    ("policy_loss(tensor([[0., 0., 5.]]), torch.zeros(1, 3), tensor([[1., 2., 9.]]), "
     "tensor([[True, True, False]]))[0]", -1.5, "the mean is over the mask"),
    ("policy_loss(torch.zeros(1, 2), torch.zeros(1, 2), tensor([[2., 0.]]), "
     "tensor([[True, True]]))[0]", -1, "the mean is over the mask, where A = 0, too"),
    ("policy_loss(tensor([[0., nan]]), tensor([[0., nan]]), tensor([[1., nan]]), "
     "tensor([[True, False]]))[0]", -1, "nan * 0 is nan: use torch.where"),
    ("grad(lambda x: policy_loss(x, tensor([[0., nan]]), tensor([[1., nan]]), "
     "tensor([[True, False]]))[0], tensor([[0., nan]]))", [[-1, 0]],
     "nan * 0 is nan in the gradient, too: use torch.where on what comes in"),
    ("policy_loss(normal(5, 2, 4), normal(6, 2, 4), normal(7, 2, 4), normal(8, 2, 4) > 0)[0]", None,
     "minimum token by token, then one masked mean"),
    (f"policy_loss(normal(9, 2, 3), normal(10, 2, 3), normal(11, 2, 3), {TWO_ROWS})[0]", None,
     "one mean over all tokens, not row by row"),
])

MU, PI = "tensor([.5, .3, .15, .05]).log()", "tensor([.4, .35, .05, .2]).log()"
FIVE = "tensor([.4, .3, .15, .1, .05]).log(), tensor([.2, .25, .25, .1, .2]).log()"
BATCH = "normal(9, 2, 3, 5), normal(10, 2, 3, 5), tensor([[0, 1, 2], [4, 3, 2]])"
KINDS = ("binary_tv", "binary_kl", "topk_tv", "topk_kl", "tv", "kl")

DIVERGENCE = Step(15, ["divergence", "trust_region_mask"], """
The mask of DPPO, [Q] Eq. 12: a token is dropped where D(mu || pi) > delta and its update would
move it further away. D is a TV = 1/2 sum |mu - pi| or a KL = sum mu log(mu / pi): over two
events, the sampled token or not (Eq. 13, 14), over the top K of mu with the sampled token and
one bucket for the rest (Eq. 15, 16; K > V counts as V), or over the whole vocabulary. In a KL
an event with mu = 0 adds 0 and one with pi = 0 < mu gives inf. If the policy is peaked, 1 - p
rounds to 0 in float32, and the KL to inf or nan: compute the probability of the rest from the
other tokens.""", [
    (f"divergence({NINE}, {HALF}, tensor(0), 'binary_tv')", 0.4, "|mu(a) - pi(a)|, Eq. 13"),
    (f"divergence({NINE}, {HALF}, tensor(0), 'binary_kl')", 0.3681,
     "KL(mu || pi), Eq. 14; the other way .5108"),
    (f"divergence({MU}, {PI}, tensor(3), 'binary_kl')", 0.0939,
     "only two events: the sampled token, or not"),
    (f"divergence({MU}, {PI}, tensor(3), 'topk_tv', 2)", 0.2,
     "the top K of mu, also the sampled token, and one bucket for the rest; half of the sum"),
    (f"divergence({MU}, {PI}, tensor(3), 'topk_kl', 2)", 0.1608,
     "the same three and the rest as one"),
    (f"divergence({FIVE}, tensor(3), 'topk_tv', 2)", 0.25,
     "tokens 0, 1 and 3, and 2 with 4 as one"),
    (f"divergence({FIVE}, tensor(3), 'topk_kl', 2)", 0.1698,
     "tokens 0, 1 and 3, and 2 with 4 as one"),
    (f"divergence({FIVE}, tensor(0), 'topk_kl', 2)", 0.1501,
     "a sampled token among the top K counts once; the rest is 2, 3 and 4"),
    (f"divergence({MU}, {PI}, tensor(0), 'topk_tv', 2)", 0.1, "the rest counts as one event"),
    ("divergence(tensor([.5, .3, .15, .05]).log(), tensor([.05, .15, .3, .5]).log(), tensor(1), "
     "'topk_tv', 1)", 0.6, "the top K are those of mu, not of pi"),
    (f"divergence({MU}, {PI}, tensor(0), 'topk_tv', 9)", 0.2, "K > V counts as K = V"),
    (f"divergence({MU}, {PI}, tensor(0), 'topk_kl', 9)", 0.1608,
     "K > V: nothing is left for the rest"),
    (f"divergence({MU}, {PI}, tensor(2), 'topk_kl', 4)", 0.1608,
     "K = V: nothing is left for the rest"),
    (f"divergence({MU}, {PI}, tensor(0), 'tv')", 0.2, "half of sum |mu - pi|, Eq. 11"),
    (f"divergence({NINE}, {HALF}, tensor(0), 'kl')", 0.3681, "sum mu log(mu / pi)"),
    (f"divergence(tensor([1., 0.]).log(), {HALF}, tensor(0), 'kl')", 0.6931, "mu = 0 adds 0"),
    ("divergence(tensor([0., 1.]).log(), tensor([.05, .95]).log(), tensor(0), 'binary_kl')", 0.0513,
     "mu = 0 adds 0"),
    (f"divergence({HALF}, tensor([1., 0.]).log(), tensor(1), 'kl')", torch.inf,
     "pi = 0 < mu gives inf: add nothing inside the logarithm"),
    (f"divergence({HALF}, tensor([1., 0.]).log(), tensor(0), 'binary_kl')", torch.inf,
     "pi = 0 < mu gives inf, also for the rest: add nothing inside the logarithm"),
    (f"divergence({HALF}, tensor([1., 0.]).log(), tensor(1), 'topk_kl', 1)", torch.inf,
     "pi = 0 < mu gives inf: add nothing inside the logarithm"),
    ("divergence(tensor([0., 500.]), tensor([500., 0.]), tensor(0), 'kl')", 500, "no limit on D"),
    ("divergence(tensor([3., 0.]), tensor([20., 0.]), tensor(0), 'binary_kl')", 0.7577,
     "1 - p rounds to 0, and log of it is -inf: sum the others"),
    ("divergence(tensor([1., 0., 0.]), tensor([20., 0., 0.]), tensor(0), 'topk_kl', 1)", 7.5023,
     "1 - p rounds to 0, and log of it is -inf: sum the others"),
    *((f"divergence({BATCH}, '{kind}', 2)", None, "logits (B, T, V) and actions (B, T)")
      for kind in KINDS),
    (f"trust_region_mask({TOKENS}, {SIGNS}, torch.ones(1, 4), .25)", [[0, 1, 1, 0]],
     "drop (0) only moves away from mu: A > 0 with r > 1, A < 0 with r < 1; keep (1) moves back"),
    (f"trust_region_mask({TOKENS}, {SIGNS}, tensor([[.1, .1, .1, .5]]), .25)", [[1, 1, 1, 0]],
     "drop only where D of this token is above delta"),
    ("trust_region_mask(tensor([[9., .1]]), tensor([[1., -1.]]), tensor([[.1, .1]]), .25)",
     [[1, 1]], "D decides, not the size of the ratio"),
    (f"trust_region_mask({TOKENS}, {SIGNS}, torch.full((1, 4), .25), .25)", [[1, 1, 1, 1]],
     "dropped is D > delta; D = delta is kept"),
    (f"trust_region_mask({TOKENS}, torch.zeros(1, 4), torch.ones(1, 4), .25)", [[1, 1, 1, 1]],
     "A = 0 is kept"),
    ("trust_region_mask(torch.ones(1, 2), tensor([[1., -1.]]), torch.ones(1, 2), .25)", [[1, 1]],
     "r = 1 is kept: it moves neither way"),
    ("trust_region_mask(tensor([[1.01, .99]]), tensor([[.1, -5.]]), torch.ones(1, 2), .25)",
     [[0, 0]], "any r above or below 1, and any A but 0"),
])

PENALTY_CASE = (
    "critical_penalty(tensor([[-1., -2., 9.]]), tensor([[-1.5, -1., 0.]]), "
    "tensor([[[.9, .1], [.5, .5], [.9, .1]]]).log(), tensor([[True, True, False]]), %s)")

PENALTY = Step(10, ["critical_penalty"], """
[V] Eq. 1 with the k2 estimator: the masked mean of J^beta (log pi - log ref)^2 / 2, where J is
the certainty of the reference at each token. (The paper calls this penalty prioritized.) The
weights and the reference carry no gradient. What lies outside the mask must not matter, not
even where it is nan, neither to the penalty nor to its gradient.""", [
    (PENALTY_CASE % 0, 0.3125,
     "beta = 0: the masked mean of k2 = (log r)^2 / 2, here of .125 and .5"),
    (PENALTY_CASE % 1, 0.0332, "mean of J * k2 over the mask: J = .531 and 0, k2 = .125 and .5"),
    (PENALTY_CASE % 2, 0.0176, "beta is the exponent of J alone: mean of J^2 * k2"),
    (PENALTY_CASE % 1.5, 0.0242, "beta need not be a whole number"),
    ("grad(lambda x: critical_penalty(x, torch.zeros(1, 2), tensor([[[.9, .1], [1., 0.]]]).log(), "
     "torch.ones(1, 2) > 0, 1), tensor([[-2., -1.]]))", [[-0.531, -0.5]],
     "the gradient is J^beta log r / n"),
    ("grad(lambda x: critical_penalty(tensor([[-2.]]), tensor([[-1.]]), x, tensor([[True]]), 2), "
     "tensor([[[1., 0.]]]))", [[[0, 0]]], "the weight carries no gradient: detach it"),
    ("grad(lambda x: critical_penalty(tensor([[-2.]]), x, torch.zeros(1, 1, 2), tensor([[True]]), "
     "0), tensor([[-1.]]))", [[0]], "the reference is frozen: no gradient by logp_ref"),
    ("critical_penalty(tensor([[-1., nan]]), tensor([[-2., nan]]), "
     "tensor([[[0., 0.], [nan, nan]]]), tensor([[True, False]]), 0)", 0.5,
     "nan * 0 is nan: use torch.where"),
    ("grad(lambda x: critical_penalty(x, tensor([[-2., nan]]), torch.zeros(1, 2, 2), "
     "tensor([[True, False]]), 0), tensor([[-1., nan]]))", [[1, 0]],
     "nan * 0 is nan in the gradient, too: use torch.where on what comes in"),
    ("critical_penalty(tensor([[-12.]]), tensor([[0.]]), tensor([[[1., 0.]]]).log(), "
     "tensor([[True]]), 3)", 72, "no limit on log r up to 12"),
    ("critical_penalty(normal(11, 2, 3), normal(12, 2, 3), 3 * normal(13, 2, 3, 5), "
     "normal(14, 2, 3) > -1, 3)", None, "each token has the weight of its own position"),
    ("critical_penalty(normal(15, 2, 3), normal(16, 2, 3), 3 * normal(17, 2, 3, 5), "
     f"{TWO_ROWS}, 3)", None, "one mean over all tokens, not row by row"),
])

STILL = "iterations=6, epochs=1, lr=.01, alpha=0., beta=0."
ONE = "iterations=1, epochs=5, lr=.1, alpha=0., beta=0."
HELD = "iterations=1, epochs=5, lr=.1, alpha=2., beta=2."
THREE = "iterations=3, epochs=12, lr=.05, alpha=20., beta=5."
TIED = "tie=3., iterations=2, epochs=12, lr=.2, alpha=3., beta=20."

TRAINING = Step(15, ["learn"], """
The whole loop, with your other functions (while it is graded, they are critkl's). The policy is
a table: for each of 6 positions the logits of 4 tokens. Token 0 is right everywhere. The
reference writes it with probability 0.97 or more, except at position 2, the critical token:
there 0.15, and any other token ends the answer without reward. A finished answer is rewarded
with 1 three times in four, by chance. The reward has a flaw, 0.5 more for token 3 at position
4, where the reference is certain: the penalty must hold the policy there, and let it go at the
critical token. Graded is what comes out of a run with a fixed seed, and whether short runs,
with other settings, end where those of critkl's own loop do. log pi of the actions is
logits.log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1).""", [
    (f"short(learn, {STILL})['curve']", None,
     "one number for each iteration: rewards summed over an episode, then averaged over episodes"),
    (f"short(learn, {STILL})['calls']", 6, "one call of sample in each iteration"),
    (f"short(learn, {ONE})['values']", None,
     "the value loss: masked mean of (values - returns)^2 / 2"),
    (f"short(learn, {ONE})['logp']", None,
     "without the penalty: are the advantages from the values before the steps, and whitened? "
     "is mu fixed?"),
    (f"short(learn, {HELD})['logp']", None,
     "alpha times J^beta k2 on each token, by the reference's certainty, on every step"),
    (f"short(learn, {THREE})['logp']", None,
     "is there one Adam, with zero_grad before each backward? are mu and the batch new each time?"),
    (f"short(learn, {THREE})['values']", None,
     "the values learn from the returns of each new batch"),
    (f"short(learn, {THREE})['curve']", None, "the rewards of each iteration's own episodes"),
    (f"short(learn, {TIED})['logp']", None,
     "where logits and values have parameters in common: the three terms of the loss have the "
     "weights 1, 1 (of half the squares) and alpha, and gradients are not cut"),
    ("trained(learn)['success']", Band(.9, 1),
     "probability of the right critical token; reference: .15, with the standard penalty: .2"),
    ("trained(learn)['kl']", Band(0, .1),
     "largest KL(pi || ref) at the other positions: is the penalty added, by the reference's "
     "certainty?"),
    ("trained(learn)['value_error']", Band(0, .25),
     "error of the value at position 0: train the values toward the returns"),
    ("trained(learn, iterations=1, epochs=50)['success']", Band(.2, .75),
     "many epochs on one batch: the clip against mu, fixed for the iteration, must stop them"),
    ("trained(learn)['reward']", Band(.65, .9),
     "mean of the last five numbers: rewards per episode"),
])

STEPS = {"certainty": CERTAINTY, "kl": KL, "mean and whitening": MEAN, "gae": GAE, "clip": CLIP,
         "divergence": DIVERGENCE, "critical penalty": PENALTY, "training run": TRAINING}
FUNCTIONS = {name: globals().get(name) or getattr(critkl, name)
             for step in STEPS.values() for name in step.functions}


# ---- Open questions, graded by hand (their rubric: instructors.md), and the bugs of the hunt.

class Question(NamedTuple):
    points: int
    text: str


QUESTIONS = {
    "estimators": Question(4, """
k1 is an unbiased estimate of KL(pi || ref). Why does it not hold the policy when it is used as
a loss? What does k2 do in its place, and what changes when the samples come from an older
policy mu?"""),
    "beta": Question(4, """
The paper takes beta = 150, your training run 10. Compute J and J^beta, for both exponents, for
a policy over 41 tokens that gives one of them 0.999 and the others the rest in equal parts, and
for one that gives two of them 0.6 and 0.4. Why is the exponent so large, and what goes wrong at
10000?"""),
    "trust region": Question(4, """
One token goes from mu = 0.0001 to pi = 0.01, another from 0.99 to 0.80. Which of the moves does
the clip (eps = 0.2) block, and which the TV mask (delta = 0.15)? What does this mean for a
critical token whose right continuation is rare under mu?"""),
    "three penalties": Question(4, """
Run your `learn` with beta = 10, with beta = 0 and with alpha = 0, on five seeds or more: `from
steps import trained`, then `trained(learn, seed=1, beta=0.0)`. Give a table of the success at
the critical token and of the largest KL at the others, with their spread over seeds, and
explain each row."""),
    "silent bugs": Question(4, """
Name two mistakes in the loop of critkl.py that raise no error and leave a rising reward curve.
For each: which number in metrics.csv, or which test on a tiny batch, would show it?"""),
}
HUNT = {                     # bugs by step: a text that critkl.py holds once, what takes its place
    "certainty": [
        ("logp, 0)).sum(-1)", "logp, 0)).sum(-1) / math.log(2)"),
        ("math.log(logits.shape[-1])", "math.log2(logits.shape[-1])")],
    "kl": [
        ("def kl_exact(logits, logits_ref):", "def kl_exact(logits_ref, logits):"),
        ("return log_ratio ** 2 / 2", "return log_ratio ** 2")],
    "mean and whitening": [
        ("x - masked_mean(x, mask)", "x - x.mean()"),
        ("(mask, x, 0).sum() / mask.sum().clamp(min=1)", "(mask, x, 0).mean()")],
    "gae": [
        ("gamma * lam * following", "gamma * following"),
        ("rewards[:, t] + gamma * next_value", "rewards[:, t] + gamma * lam * next_value")],
    "clip": [
        ("ratio.clamp(1 - eps_low, 1 + eps_high)", "ratio.clamp(1 - eps_low, 1 + eps_low)"),
        ("torch.min(ratio * advantages, clipped * advantages)", "clipped * advantages")],
    "divergence": [
        ("log_mu.topk(", "log_pi.topk("),
        ("away & (D > delta)", "D > delta")],
}


# ---- Texts of the stubs and of the notebook.

HEADER = '''"""My solution. Points per step: python notebooks/grade.py mine.py"""
import math

import torch
import torch.nn.functional as F
'''
INTRODUCTION = """# Assignment

Write the functions below; together they are the core of `critkl.py`, and the last of them trains.
Each step says what is asked, then comes a stub, then a check that shows your points and, if
something is wrong, one small example (with `tensor` and `nan` of torch, and `grad`, `normal`,
`trained` and `short` of `steps.py`). The steps are independent and may be done in any order: while
one is checked, the functions of all others are critkl's own. They give 100 points, the open
questions up to 20, by hand.
[V] is Vassoyan et al., arXiv 2502.06533, [Q] is Qi et al., arXiv 2602.04879.

A check that does not end can be interrupted. `python notebooks/grade.py
notebooks/assignment.ipynb` grades the saved notebook as your instructor will, in a process of its
own with time limits. There only imports, definitions and assignments are run."""
SETUP = """import math
import sys
from pathlib import Path

here = Path("notebooks") if Path("notebooks").exists() else Path.cwd()
sys.path.insert(0, str(here.resolve()))
import torch
import torch.nn.functional as F

from grade import check"""
