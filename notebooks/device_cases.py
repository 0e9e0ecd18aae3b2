"""critkl off the CPU: on a pretend device (pretend.py) it gives the numbers of the CPU, and seldom
waits for the device. bfloat16 autocast, nccl and CUDA's own kernels stay unproven by this."""
import csv
import json
import zlib
from dataclasses import replace

import critkl
import pretend
import pytest
import torch

torch.set_num_threads(1)
TINY = dict(digits=1, layers=1, width=8, heads=1, pretrain_steps=3, pretrain_batch=4, iterations=1,
            episodes=4, minibatch=2, epochs=1, eval_problems=2, test_problems=3)
OTHER_MODES = dict(evaluate=critkl.evaluate, inspect=critkl.inspect, bench=critkl.bench)

def run(device, out, mode, **given):
    """The folder of a run on a device, whose name the command line does not know."""
    training = "none" if mode in OTHER_MODES else mode
    cfg = critkl.make_config(TINY | dict(mode=training, out=str(out / device)) | given)
    cfg = replace(cfg, device=device, mode=mode, problem="3+12")
    folder = critkl.run_folder(replace(cfg, device="any"))
    with critkl.Log(quiet=True) as log:
        OTHER_MODES.get(mode, critkl.train)(cfg, log, folder)
    return folder

def on_both(out, name, **given):
    """The text of a file of the run, from the CPU and from the device."""
    texts = [(run("cpu", out, **given) / name).read_text()]
    with pretend.use():
        texts.append((run("pretend", out, **given) / name).read_text())
    return texts

def metrics(text):
    """Rows of metrics.csv without the seconds."""
    rows = list(csv.DictReader(text.splitlines()))
    for row in rows:
        del row["seconds"]
    return rows

@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder for runs: those of the same settings share a pretrained model in it. A right answer
    is here one with an even checksum: else nothing would be learned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(critkl, "is_correct", lambda a, b, text: zlib.crc32(text.encode()) % 2 == 0)
        patch.setattr(critkl, "check", lambda cfg: None)             # it knows no such device
        yield tmp_path_factory.mktemp("runs")


# ---- The same numbers.

@pytest.mark.parametrize("given", [
    dict(mode="standard", temperature=2.0),
    dict(mode="critical", kl_kind="exact", entropy_coef=0.01, anchor="recomputed", window=4),
    dict(mode="dppo", divergence="topk_kl", advantage="group", group=2)], ids=str)
def test_the_device_gives_the_numbers_of_the_cpu(out, given):
    on_cpu, on_device = map(metrics, on_both(out, "metrics.csv", **given))
    assert len(on_cpu) == 2 and on_cpu == on_device
    assert float(on_cpu[1]["grad_norm"]) > 0

def test_inspect_does_too(out):
    on_cpu, on_device = on_both(out, "inspect.json", mode="inspect")
    assert on_cpu == on_device

def test_evaluate_does_too(out, monkeypatch):
    """But for its bfloat16 sampler; sampled and greedy answers are left out, they take long."""
    monkeypatch.setattr(critkl, "graded", lambda *_: torch.ones(1))
    on_cpu, on_device = map(json.loads, on_both(
        out, "evaluation.json", mode="evaluate", test_problems=1))
    del on_cpu["sampler"], on_device["sampler"]
    assert on_cpu == on_device

def a_second(call, cfg):
    call()
    return 1.0

def test_the_device_runs_bench(out, monkeypatch):
    monkeypatch.setattr(critkl, "mean_seconds", a_second)
    with pretend.use():
        assert (run("pretend", out, mode="bench") / "bench.json").exists()

def test_a_stopped_run_goes_on_there(out):
    """Two iterations at once, and one, a stop, and one."""
    given = dict(mode="standard", iterations=2, eval_every=2)
    whole = metrics((run("cpu", out, **given) / "metrics.csv").read_text())
    with pretend.use(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(critkl, "update", stop_after(critkl.update))
        with pytest.raises(KeyboardInterrupt):
            run("pretend", out, **given)
        patch.undo()
        resumed = metrics((run("pretend", out, **given) / "metrics.csv").read_text())
    assert resumed == whole

def stop_after(update):
    """`update`, but the second call is interrupted."""
    calls = []

    def counted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return update(*args)

    return counted

def test_the_device_refuses_to_meet_the_cpu():
    with pretend.use():
        there, here = torch.zeros(2, device="pretend"), torch.zeros(2)
        assert (there + 1).tolist() == [1, 1] and there[torch.tensor([0])].tolist() == [0]
        with pytest.raises(RuntimeError, match="in one operation"):
            there + here


# ---- How often Python waits for the device: never once for each token.

@pytest.fixture
def work():
    """A policy on the device, problems, and a way to count waits and forward passes."""
    with pretend.use():
        torch.manual_seed(0)
        cfg = critkl.make_config(TINY | dict(mode="critical"))
        cfg = replace(cfg, device="pretend")
        policy = critkl.new_model(cfg)
        passes = []
        policy.register_forward_hook(lambda *_: passes.append(1))
        yield cfg, policy, passes, [(1, 2), (3, 4), (5, 0), (6, 1)]

def count(passes, call):
    """(what the call returns, its waits, its forward passes)."""
    pretend.waits.clear()
    passes.clear()
    result = call()
    return result, sum(pretend.waits.values()), len(passes)

def prompts_and_drafts(problems):
    return ([critkl.encode(critkl.prompt(a, b)) for a, b in problems],
            [critkl.encode(critkl.scratchpad(a, b)) for a, b in problems])

@pytest.mark.parametrize("limit", [5, 20])
def test_sampling_waits_for_each_pass_not_for_each_token(work, limit):
    _, policy, passes, problems = work
    prompts, drafts = prompts_and_drafts(problems)
    _, waits, forward = count(passes, lambda: critkl.generate(policy, prompts, limit))
    assert forward == limit + 2 and waits <= 2 * forward
    _, waits, forward = count(
        passes, lambda: critkl.generate_drafted(policy, prompts, drafts, limit))
    assert forward <= limit and waits <= 2 * forward + 6 * len(problems)

def test_an_iteration_waits_a_few_times_for_each_minibatch(work):
    cfg, policy, passes, problems = work
    sampled, waits, forward = count(passes, lambda: critkl.rollout(policy, problems, 0))
    assert waits <= 2 * forward + 6 * len(problems)
    batch, waits, _ = count(passes, lambda: critkl.prepare(sampled, policy, policy, cfg))
    assert waits == 0
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    _, waits, minibatches = count(
        passes, lambda: critkl.update(policy, optimizer, batch, cfg, 0))
    assert minibatches == 2 and waits <= 3 * minibatches
    _, waits, _ = count(passes, lambda: critkl.explained_variance(batch, sampled.values))
    assert waits <= 2

def test_a_step_of_pretraining_waits_once(work):
    cfg, model, passes, _ = work
    optimizers = critkl.pretraining_optimizers(model, cfg)
    examples = critkl.pretraining_batches(cfg, 0)[0]
    _, waits, _ = count(
        passes, lambda: critkl.pretraining_step(model, optimizers, examples, 0.01))
    assert waits == 1
