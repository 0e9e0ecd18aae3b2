"""The steps of critkl's course assignment: what is to be written and what is asked of it.

    python notebooks/grade.py --stubs       prints the functions to write
    python notebooks/grade.py FILE          grades a file

STEPS holds the steps, in any order. A case is (expression, value worked out by hand or None, hint); where
the value is None the answer is what critkl's own functions give. In the expressions tensor is torch.tensor,
and grad and normal are the two functions below. Cases are small enough to follow on paper.
"""
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import critkl
from critkl import certainty, kl_estimate, kl_weight, masked_mean


def prioritized_penalty(logp, logp_ref, logits_ref, mask, beta):
    """The prioritized KL penalty, [V] Eq. 1: masked mean of J^beta * k2, (B, T) log-probabilities of the
    sampled tokens under pi and ref, reference logits (B, T, V) and mask (B, T) to a scalar.

    J is the certainty of the reference. The reference is frozen: the only gradient is that by logp.
    """
    weight = kl_weight(certainty(logits_ref), beta).detach()
    return masked_mean(weight * kl_estimate(logp, logp_ref.detach(), "k2"), mask)


def grad(f, x):
    """Gradient of sum f(x) by x; 0 where f does not depend on x."""
    x = x.clone().requires_grad_()
    y = f(x).sum()
    return torch.autograd.grad(y, x)[0] if y.requires_grad else torch.zeros_like(x)


def normal(seed, *shape):
    """Standard normal numbers, always the same ones for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Step(NamedTuple):
    points: int
    functions: list          # names, in critkl.py or here
    note: str                # for the stubs
    cases: list


HALF, NINE = "tensor([.5, .5]).log()", "tensor([.9, .1]).log()"      # log-probabilities are logits, too
AVERAGE = "grad(lambda x: x.softmax(-1).detach() * kl_estimate(x.log_softmax(-1), " + NINE + ", %r), " + HALF + ")"
MU, PI = "tensor([.5, .3, .15, .05]).log()", "tensor([.4, .35, .05, .2]).log()"
CLIP = "policy_loss(tensor([[%s]]).log(), torch.zeros(1, 1), tensor([[%s]]), tensor([[True]])%s)[0]"
TOKENS = "tensor([[1.5, .5, 1.5, .5]])"
PENALTY = ("prioritized_penalty(tensor([[-1., -2., 9.]]), tensor([[-1.5, -1., 0.]]), tensor([[[.9, .1], "
           "[.5, .5], [.9, .1]]]).log(), tensor([[True, True, False]]), %s)")

CLIP_NOTE = ("Graded are trust_region clip and none, with numbers for eps; info may\n"
             "# be {}, and divergence, delta, ratio_cap and logp_anchor keep their defaults.")

STEPS = {
    "certainty": Step(10, ["entropy", "certainty", "kl_weight"], "Graded: kind negentropy.", [
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
    "kl": Step(15, ["kl_estimate", "kl_exact"], "", [
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
    "mean and whitening": Step(10, ["masked_mean", "whiten"], "", [
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
    "gae": Step(20, ["gae"], "", [
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
    "clip": Step(15, ["policy_loss"], CLIP_NOTE, [
        (CLIP % (0.5, 1., ""), -0.5, "r = pi / mu = exp(logp - logp_mu), and the loss is minus the objective"),
        (CLIP % (1.5, 1., ""), -1.2, "min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), Eq. 10"),
        (CLIP % (0.5, -1., ""), 0.8, "A < 0: the minimum takes the clipped term below 1 - eps_low"),
        (CLIP % (1.5, -1., ""), 1.5, "A < 0 and r > 1: the move back toward mu is not clipped"),
        (CLIP % (1.25, 1., ", 'clip', 0.2, 0.28"), -1.25, "the upper end is 1 + eps_high"),
        (CLIP % (0.75, -1., ", 'clip', 0.2, 0.28"), 0.8, "the lower end is 1 - eps_low"),
        (CLIP % (3., 1., ", 'none'"), -3, "trust region none: the objective is r A"),
        (f"grad(lambda x: policy_loss(x, torch.zeros(1, 4), tensor([[1., 1., -1., -1.]]), {TOKENS} > 0)[0], "
         f"{TOKENS}.log())", [[0, -0.125, 0.375, 0]], "gradient -r A / n where r is not clipped, else 0"),
        ("policy_loss(tensor([[0., 0., 5.]]), torch.zeros(1, 3), tensor([[1., 2., 9.]]), tensor([[True, True, "
         "False]]))[0]", -1.5, "the mean is over the mask: padding neither adds nor counts"),
        ("policy_loss(normal(5, 2, 4), normal(6, 2, 4), normal(7, 2, 4), normal(8, 2, 4) > 0)[0]", None,
         "minimum token by token, then one masked mean"),
    ]),
    "divergence": Step(20, ["divergence", "trust_region_mask"], "", [
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
    "prioritized loss": Step(10, ["prioritized_penalty"], "", [
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
}
FUNCTIONS = {name: prioritized_penalty if name == "prioritized_penalty" else getattr(critkl, name)
             for step in STEPS.values() for name in step.functions}
