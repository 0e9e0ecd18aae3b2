"""Tests of plots.py. Runs are files written here, numbers are worked by hand."""
import asyncio
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import plots

PLOTS = os.path.abspath(plots.__file__)
SETTINGS = dict(
    mode="critical", penalty="critical", preset="laptop", digits=3, extra=1, dial=0.2,
    mistakes=0.3, width=64, pretrain_steps=1600, iterations=40, episodes=64, minibatch=16, lr=3e-4,
    alpha=2.0, kl_kind="k2",
    beta=150.0, certainty="negentropy", certainty_temperature=0.0, method="ppo",
    trust_region="clip",
    eps_low=0.2, eps_high=0.2, divergence="binary_tv", delta=0.15, top_k=20, ratio_cap=None,
    anchor="rollout", relax="none", relax_below=0.1, advantage="gae", group=8,
    sampler_dtype="float32", staleness=1, fixed=0, seed=0, out="runs", name="", eval_every=10,
    eval_problems=200, problem="",
    checkpoint="")
METHODS = dict(
    ppo={}, pg_is=dict(trust_region="none"), cispo=dict(trust_region="none", ratio_cap=3.0),
    grpo_clip_higher=dict(eps_high=0.28), minirl=dict(eps_high=0.28, anchor="recomputed"),
    minirl_tis=dict(eps_high=0.28, anchor="recomputed", ratio_cap=3.0),
    dppo=dict(trust_region="divergence"), negative_only=dict(trust_region="negative", delta=0.5))
NUMBER = itertools.count()


def csv_text(rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[f"{row[name]:.6g}" if name in row else "" for name in names] for row in rows]
    return "\n".join(map(",".join, [names, *lines])) + "\n"


def a_run(root, result=None, rows=None, folder=None, **settings):
    """A run folder with these settings, rows of metrics.csv and what the run wrote at its end."""
    mode = settings.get("mode", "critical")
    if mode in ("none", "standard", "critical"):
        settings["penalty"] = mode
    values = SETTINGS | METHODS[settings.get("method", "ppo")] | settings
    folder = root / (folder or f"{next(NUMBER):04d}")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(settings=values, version="2.0", torch="2")))
    if rows:
        (folder / "metrics.csv").write_text(csv_text(rows))
    if result is not None:
        (folder / plots.RESULT[mode][0]).write_text(json.dumps(result))
    return folder


def some_rows(last=20, success=0.5):
    comma = {f"line{line}_{operand}_n+1_comma": 0.7
             for line in (1, 2, 3) for operand in ("first", "second")}
    return [{"iteration": i, "accuracy_N": 0.9, "accuracy_N+1": success + 0.01 * i, **comma}
            for i in range(0, last + 1, 10)]


def success(n, target):
    """summary.json of a run with this success at N and N+1, nine tenths and a half before RL."""
    after, before = {"N": n, "N+1": target}, {"N": 0.9, "N+1": 0.5}
    intervals = {}
    for when, values in (("accuracy", after), ("pretrained_accuracy", before)):
        intervals[when] = {digits: [x, x - 0.01, x + 0.02] for digits, x in values.items()}
    tokens = {"line1_first_n+1_comma": dict(before=0.5, after=0.75), "other": dict(before=1)}
    return dict(intervals=intervals, critical_tokens=tokens)


def inspection(problem="12+7", text=None, J=None):
    text = text or "\n[1,2] + [7]\n1 9\n"
    J = J or [1 - 0.002 * i for i in range(len(text))]
    others = [["]", 0.125], ["0", 0.0625], ["1", 0.03], [",", 0.00001]]
    pretrained = [[[c, 0.75], *others] for c in text]
    policy = [[[c, 0.9], ["<", 0.05], ["0", 0.03], ["1", 0.01], [",", 0.01]] for c in text]
    policy[3] = [["x", 0.6], *policy[3][1:]]
    return dict(problem=problem, text=text, certainty=J, correct=True, weight=[j**150 for j in J],
                pretrained=pretrained, policy=policy)


def evaluation(mean, **more):
    """evaluation.json of a policy with this success at N, a half at N+1, a third at N+2 ..."""
    rows = [{"set": kind, "digits": digits, "sampled": [mean / k, mean / k - 0.01, mean / k + 0.03]}
            for kind in ("identical", "varying") for k, digits in enumerate(plots.SETS, 1)]
    gap = {"critical": [-0.3, -0.4, -0.2], "critical commas": [-0.4, -0.5, -0.3],
           "non-critical": [0.001, 0.0005, 0.0015]}
    end = dict(rows=rows, sampler=[[0.5, 0.4]], certainty_gap=gap, definition=dict(uncertain=3))
    return end | more


def chosen(root, name):
    """The groups that a picture is drawn from."""
    found = plots.choose(plots.read_groups([str(root)]), *plots.FIGURES[name][2:])
    plots.dress(found)
    return found


def figure_of(root, name):
    make, what, *_ = plots.FIGURES[name]
    return make(chosen(root, name), what)


def drawn(axes):
    """{label: the points of a line with error bars}."""
    return {c.get_label(): c[0].get_xydata().tolist() for c in axes.containers}


def cells(lines):
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def draw(folder, *args, out=None, **more):
    """plots.py as a process."""
    command = [sys.executable, PLOTS, str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, **more)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(plots.STYLE, "savefig.dpi", 20)


# ---- Whatever a folder holds.

STATES = dict(
    whole=None, no_summary="summary.json", no_metrics="metrics.csv",
    empty=("metrics.csv", lambda text: ""),
    header_only=("metrics.csv", lambda text: text.split("\n")[0] + "\n"),
    torn_row=("metrics.csv", lambda text: text[:-40]),
    repeated=("metrics.csv", lambda text: text + text.split("\n")[2] + "\n"),
    fewer_columns=("metrics.csv", lambda text: "iteration,accuracy_N+1\n0,0.1\n10,nan\n20,0.3\n"),
    broken_summary=("summary.json", lambda text: "{"))


def test_plots_survive_every_state_of_a_run_folder(tmp_path):
    """One seed for each state, without a display, with a matplotlibrc that asks for LaTeX."""
    for seed, (state, change) in enumerate(STATES.items()):
        folder = a_run(tmp_path / "runs", success(0.9, 0.8), some_rows(), state, seed=seed)
        if isinstance(change, str):
            (folder / change).unlink()
        elif change:
            file = folder / change[0]
            file.write_text(change[1](file.read_text()))
    style = "text.usetex: True\nfont.size: 60\nfigure.autolayout: True\n"
    (tmp_path / "matplotlibrc").write_text(style)
    env = {k: v for k, v in os.environ.items() if k != "DISPLAY"} | {"MATPLOTLIBRC": str(tmp_path)}
    done = draw(tmp_path / "runs", env=env)
    assert done.returncode == 0 and done.stderr == ""
    for name in ("learning_curves.png", "learning_curves.pdf", "critical_tokens.png", "results.md"):
        assert (tmp_path / "runs" / name).stat().st_size > 0
    for state in STATES:
        named = re.search(rf"runs/{state}\b", done.stdout)
        assert named or state in (
            "whole", "no_summary", "no_metrics", "header_only", "repeated", "fewer_columns")


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    run = a_run(tmp_path / "runs", success(0.9, 0.8), some_rows())
    wrong = [[str(tmp_path / "nowhere")], [str(tmp_path / "file")], [], ["--colour"],
             [str(run), "--out", str(tmp_path / "file")], [str(run), "--out", "/dev/null/x"]]
    (tmp_path / "empty").mkdir()
    for args in [*wrong, [str(tmp_path / "empty")]]:
        with pytest.raises(SystemExit, match="2"):
            plots.main(args)
        assert capsys.readouterr().err.count("\n") == 1
    assert not list((tmp_path / "empty").iterdir())


def test_links_are_followed_and_circles_end(tmp_path):
    outside = a_run(tmp_path / "elsewhere", success(0.9, 0.8), some_rows(), seed=0)
    a_run(tmp_path / "deep" / "er", success(0.9, 0.8), some_rows(), seed=1)
    runs = tmp_path / "runs"
    runs.mkdir()
    for name, target in (("linked", outside), ("again", outside), ("deep", tmp_path / "deep"),
                         ("circle", runs), ("deep/circle", tmp_path / "deep")):
        (runs / name).symlink_to(target, target_is_directory=True)
    (runs / "lost").symlink_to(tmp_path / "nowhere")
    group, = plots.read_groups([str(runs)])
    assert sorted(run["seed"] for run in group.runs) == [0, 1]
    (tmp_path / "alias").symlink_to(outside, target_is_directory=True)
    assert len(plots.read_groups([str(tmp_path / "alias")])) == 1


DAMAGED = [
    ("metrics.csv", b"\xff\x00,1\n" + bytes(range(256))), ("metrics.csv", b""),
    ("metrics.csv", b"iteration,accuracy_N\n0,0.5,7\n"), ("metrics.csv", b"step,reward\n0,0.5\n"),
    ("metrics.csv", b"iteration,accuracy_N\n0,#DIV/0!\n"), ("summary.json", b"[" * 100000),
    ("summary.json", b""), ("summary.json", b'{"intervals": {"accuracy": {"N": [0.9'),
    ("summary.json", b"[1]"), ("summary.json", b"\xff\xfe"), ("summary.json", b"{}"),
    ("summary.json", b'{"intervals": {"accuracy": {"N": [0.5, 0.4, NaN]}}}'),
    ("summary.json", b'{"intervals": {"accuracy": {"N": [1e999]}}}'),
    ("summary.json", b'{"intervals": [0.5]}'), ("summary.json", b"9" * 5000),
    ("summary.json", b'{"intervals": {"accuracy": {"N": "x"}}}'),
    ("config.json", b"[" * 100000), ("config.json", b"{}"), ("config.json", b""),
    ("config.json", b'{"settings": {"mode": []}}'), ("config.json", b"9" * 5000),
    ("config.json", b'{"settings": {"mode": "critical", "penalty": {}}}'),
    ("config.json", b'{"settings": {"mode": "dance"}}')]


@pytest.mark.parametrize("name, content", DAMAGED)
def test_damaged_files_are_named(tmp_path, name, content, capsys):
    """Each in one line that names the folder; what the others hold is drawn."""
    a_run(tmp_path, success(0.9, 0.8), some_rows(), seed=0)
    folder = a_run(tmp_path, success(0.9, 0.8), some_rows(), seed=1)
    (folder / name).write_bytes(content)
    group, = plots.read_groups([str(tmp_path)])
    said = [line for line in capsys.readouterr().out.split("\n") if "left out" in line]
    assert len(said) == 1 and str(folder) in said[0]
    assert len(group.runs) == (1 if name == "config.json" else 2)
    assert sum(bool(run["end"]) for run in group.runs) == (2 if name == "metrics.csv" else 1)


ALIEN = [
    [], 3, {"rows": 5}, {"rows": [1]}, {"text": "ab", "certainty": [None, "x"]},
    {"rows": [{"set": [], "digits": {}}], "sampler": [[]], "phases": {"a": 1}},
    {"text": 5, "certainty": [1]}, {"phases": {"update": {"seconds": "x"}}},
    {"text": "", "certainty": []}]


@pytest.mark.parametrize("alien", ALIEN)
def test_results_of_other_programs(tmp_path, alien, capsys):
    for mode in ("critical", "evaluate", "inspect", "bench"):
        a_run(tmp_path, alien, mode=mode)
    odd = (dict(digits="x", extra=None, alpha="y", seed="z"), dict(alpha=10**400, lr=True))
    for settings in odd:
        a_run(tmp_path, success(0.9, 0.8), some_rows(), **settings)
    groups = plots.read_groups([str(tmp_path)])
    assert len(groups) == 2 and capsys.readouterr().out.count(".json: left out") == 4


def test_odd_results_do_not_stop_it(tmp_path, capsys):
    a_run(tmp_path, None, some_rows())
    for end in (inspection() | {"certainty": [0.5]}, inspection(J=[math.nan] * 17)):
        a_run(tmp_path, end, mode="inspect")
    answer = inspection()
    del answer["weight"]
    a_run(tmp_path, answer, mode="inspect")
    groups = plots.read_groups([str(tmp_path)])
    assert capsys.readouterr().out.count(".json: left out") == 2
    assert plots.answers(groups) == ""


SHEETS = dict(
    mark=lambda text: "\ufeff" + text, dos=lambda text: text.replace("\n", "\r\n"),
    semicolons=lambda text: text.replace(",", ";").replace(".", ",").replace("\n", "\r\n"),
    tabs=lambda text: text.replace(",", "\t"), empty_lines=lambda text: text + ",,,,,,,,\n\n",
    quoted=lambda text: re.sub(r"[^,\n]+", r'"\g<0>"', text),
    cut=lambda text: text[:-1])


@pytest.mark.parametrize("change", SHEETS.values(), ids=SHEETS)
def test_metrics_saved_by_a_spreadsheet(change):
    text = csv_text(some_rows())
    assert plots.parse_metrics(change(text).removeprefix("\ufeff")) == plots.parse_metrics(text)


def test_a_byte_order_mark_is_read(tmp_path, capsys):
    for seed in (0, 1):
        folder = a_run(tmp_path, None, some_rows(), seed=seed)
    for file in folder.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    group, = plots.read_groups([str(tmp_path)])
    assert [len(run["rows"]) for run in group.runs] == [3, 3]


# ---- The process.

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of which only tables are drawn, in a folder with a name that few encodings have."""
    root = tmp_path_factory.mktemp("żółw $x$")
    a_run(root, dict(phases={"update": dict(seconds=1.0)}), mode="bench", folder="żółw")
    (root / "żółw" / "metrics.csv").write_text("x")
    return root


@pytest.mark.parametrize("encoding", ["ascii"])
def test_output_that_cannot_show_a_name(small, tmp_path, encoding):
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = draw(small, "--out", str(tmp_path), env=env)
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "results.md").exists()


@pytest.mark.parametrize("output", [">&-", "| head -n 1"])
def test_output_that_is_closed(small, tmp_path, output):
    command = f"set -o pipefail; '{sys.executable}' '{PLOTS}' '{small}' --out '{tmp_path}' {output}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "results.md").exists()


TELL = """
import runpy, signal, sys
set_handler = signal.signal
def tell(*args):
    set_handler(*args)
    print("ready", flush=True)
signal.signal = tell
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("drawing", [False, True])
def test_ctrl_c_at_any_moment(tmp_path, drawing):
    """130 and nothing else, from the first statement on, and when the first picture is there."""
    a_run(tmp_path / "runs", success(0.9, 0.8), some_rows())
    out = tmp_path / "out"
    command = [sys.executable, "-c", TELL, PLOTS, str(tmp_path / "runs"), "--out", str(out)]
    # a job in the background would have been started with Ctrl-C ignored
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=heed)
    assert process.stdout.readline() == "ready\n"
    while drawing and process.poll() is None and not list(out.glob("*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")


def test_ctrl_c_in_a_program_that_calls_main(monkeypatch, small):
    def interrupt(argv):
        raise KeyboardInterrupt
    monkeypatch.setattr(plots, "read_groups", interrupt)
    assert plots.main([str(small)]) == 130


def test_the_users_style_comes_back(small, tmp_path, quick):
    with plots.matplotlib.rc_context({"font.size": 33}):
        assert plots.main([str(small), "--out", str(tmp_path)]) == 0
        assert plots.matplotlib.rcParams["font.size"] == 33


# ---- What is compared.

def test_runs_that_differ_in_the_seed_alone_are_a_group(tmp_path, capsys):
    for seed in range(2):
        rest = dict(rows=some_rows(), seed=seed)
        a_run(tmp_path, mode="none", alpha=7.0, beta=9.0, name=f"n{seed}", **rest)
        a_run(tmp_path, mode="none", method="dppo", eps_low=0.1, **rest)
        a_run(tmp_path, mode="standard", beta=10.0 * seed, **rest)
        a_run(tmp_path, mode="critical", beta=10.0 + seed, **rest)
    groups = plots.read_groups([str(tmp_path)])
    assert sorted((g.key["penalty"], len(g.runs)) for g in groups) == [
        ("critical", 1), ("critical", 1), ("none", 2), ("none", 2), ("standard", 2)]
    twin = a_run(tmp_path, success(0.9, 0.8), mode="standard", seed=0)
    capsys.readouterr()
    plots.read_groups([str(tmp_path)])
    assert f"{twin}: left out, another run has its settings" in capsys.readouterr().out


def test_the_first_picture_shows_one_group_of_each_penalty(tmp_path):
    """That with the most runs, among groups that are alike in all else."""
    for seed in range(3):
        for mode in ("none", "standard", "critical"):
            a_run(tmp_path, None, some_rows(), mode=mode, seed=seed)
    for seed in range(2):
        a_run(tmp_path, None, some_rows(), mode="standard", alpha=0.02, seed=seed)
        a_run(tmp_path, None, some_rows(), mode="critical", lr=1e-3, seed=seed)
    found = chosen(tmp_path, "learning_curves")
    assert [(g.key["penalty"], g.key.get("alpha"), g.key["lr"]) for g in found] == [
        ("none", None, 3e-4), ("standard", 2.0, 3e-4), ("critical", 2.0, 3e-4)]
    assert [group.label for group in found] == ["none", "standard", "critical"]
    assert [group.style for group in found] == plots.LOOKS[:3]
    for seed in (2, 3):
        a_run(tmp_path, None, some_rows(), mode="standard", alpha=0.02, seed=seed)
    labels = [group.label for group in chosen(tmp_path, "learning_curves")]
    assert labels == ["none", "standard, alpha 0.02", "critical, alpha 2.0"]


def test_degrees_of_pretraining(tmp_path):
    for mistakes in (0.1, 0.3, 0.5):
        a_run(tmp_path, None, some_rows(), mistakes=mistakes)
    a_run(tmp_path, None, some_rows(), mistakes=0.2, alpha=0.5)
    labels = [group.label for group in chosen(tmp_path, "pretraining")]
    assert labels == ["mistakes 0.1", "mistakes 0.3", "mistakes 0.5"]


def test_methods(tmp_path):
    for method in METHODS:
        a_run(tmp_path, None, some_rows(), mode="none", method=method)
    found = chosen(tmp_path, "trust_region")
    assert sorted(group.label for group in found) == sorted(METHODS)
    assert len({str(group.style) for group in found}) == 8


def test_a_mean_never_changes_its_seeds(tmp_path, capsys):
    """The curve ends where the first seed does, and has a point only where all were evaluated."""
    for seed, every, last in ((0, 10, 40), (1, 20, 40), (2, 20, 20)):
        rows = [dict(iteration=i, accuracy_N=0.2 * seed) for i in range(0, last + 1, every)]
        a_run(tmp_path, None, rows, seed=seed)
    a_run(tmp_path, None, None, seed=3)
    odd = a_run(tmp_path, None, [dict(iteration=0, reward=0.5)], seed=4)
    group, = plots.read_groups([str(tmp_path)])
    x, y = group.curve("accuracy_N")
    assert f"{odd}: left out of a curve, it has no accuracy_N\n" in capsys.readouterr().out
    assert x == [0, 20]
    assert np.array(y) == pytest.approx(np.array([[20, 4.303 * 20 / math.sqrt(3)]] * 2))


def test_the_first_picture_by_hand(tmp_path):
    """Three panels; the third is the mean over the listed n+1 commas, and nothing else."""
    row = {"iteration": 0, "accuracy_N": 0.9, "accuracy_N+1": 0.4, "line1_first_n+1_comma": 0.5,
           "line3_second_n+1_comma": 0.7, "line1_first_n+1_digit": 0.1,
           "line1_first_n+2_comma": 0.1}
    a_run(tmp_path, None, [row])
    axes = figure_of(tmp_path, "learning_curves").axes
    assert [drawn(a)["critical"][0][1] for a in axes] == pytest.approx([40, 90, 60])
    assert [a.get_ylim() for a in axes] == [(0, 100)] * 3
    axes = figure_of(tmp_path, "critical_tokens").axes
    assert len(axes) == 6 and drawn(axes[0])["critical"] == [[0, 50]]


def test_frontier_by_hand(tmp_path):
    """Named are the points that no other of their penalty beats at both; none lies on another."""
    for i, alpha in enumerate((0.002, 0.02, 0.2, 0.5, 2.0, 20.0)):
        for mode in ("standard", "critical"):
            a_run(tmp_path, success(0.9 + 0.01 * i, 0.9 - 0.02 * i), mode=mode, alpha=alpha)
    a_run(tmp_path, success(0.89, 0.7), mode="critical", alpha=99.0)
    with plots.matplotlib.rc_context(plots.STYLE):
        figure = figure_of(tmp_path, "frontier")
        figure.draw_without_rendering()
        axes, = figure.axes
        boxes = [plots.matplotlib.text.Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == 12 and not any("99" in text.get_text() for text in axes.texts)
    assert axes.get_xlim()[1] == axes.get_ylim()[1] == 100
    for i, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:i]) and not box.overlaps(axes.bbox)
        assert box.x1 <= figure.bbox.x1


def test_sweeps_by_hand(tmp_path):
    """No penalty is alpha 0, the standard penalty beta 0."""
    a_run(tmp_path, success(0.9, 0.3), mode="none")
    for alpha in (0.5, 2.0):
        a_run(tmp_path, success(0.9, alpha / 10), mode="standard", alpha=alpha)
        a_run(tmp_path, success(0.9, alpha / 5), mode="critical", alpha=alpha)
    a_run(tmp_path, success(0.9, 0.6), mode="critical", beta=1000.0)
    beta = figure_of(tmp_path, "beta_sweep").axes[0]
    assert [text.get_text() for text in beta.get_xticklabels()] == ["0", "150.0", "1000.0"]
    assert drawn(beta)["standard"] == [pytest.approx([0, 20])]
    assert np.array(drawn(beta)["critical"]) == pytest.approx(np.array([[1.1, 40], [2.1, 60]]))
    alpha = drawn(figure_of(tmp_path, "alpha_sweep").axes[0])
    assert {name: [y for _, y in points] for name, points in alpha.items()} == {
        "none": [30], "standard": pytest.approx([5, 20]), "critical": pytest.approx([10, 40])}


def test_penalties_crossed_with_trust_regions(tmp_path):
    for i, penalty in enumerate(plots.PENALTIES):
        for j, method in enumerate(("dppo", "pg_is", "ppo")):
            a_run(tmp_path, success(0.9, 0.1 + 0.3 * i + 0.1 * j), mode=penalty, method=method)
    points = drawn(figure_of(tmp_path, "crossed").axes[0])
    for i, penalty in enumerate(plots.PENALTIES):
        y = [y for _, y in points[penalty]]
        assert y == pytest.approx([10 + 30 * i, 20 + 30 * i, 30 + 30 * i])


def test_evaluations(tmp_path):
    """Mean and Student's interval over two seeds; the mean of one."""
    for seed, mean in ((0, 0.8), (1, 0.9)):
        end = evaluation(mean, definition={"listed": 3 + seed})
        a_run(tmp_path, end, mode="evaluate", seed=seed)
    a_run(tmp_path, evaluation(0.6), mode="evaluate", checkpoint="runs/critical-1234-seed7")
    groups = chosen(tmp_path, "accuracy_by_digits")
    assert [group.label for group in groups] == ["critical-1234", "pretrained"]
    points = drawn(figure_of(tmp_path, "accuracy_by_digits").axes[1])
    assert [y for _, y in points["critical-1234"]] == pytest.approx([60, 30, 20, 15])
    tables = plots.TABLES["accuracy_by_digits"]
    rows = cells(plots.table("x", groups, tables["accuracy_by_digits, %"]))
    assert ["varying N.sampled", "60", "85 ± 64"] in rows and rows[0] == ["seeds", "1", "2"]
    rows = cells(plots.table("x", groups, tables["certainty gap"]))
    assert rows[0] == ["seeds", "1", "2"] and rows[2] == ["critical commas", "-0.4", "-0.4 ± 0"]
    rows = cells(plots.table("x", groups, tables["critical tokens by definition"]))
    assert rows[1] == ["pretrained", "2", "", "3.5 ± 6.4"] or ["listed", "", "3.5 ± 6.4"] in rows


def test_mismatch(tmp_path):
    a_run(tmp_path, evaluation(0.9, sampler=[[0.5, 0.4], [0.1, 0.2], [0.0, 0.5]]), mode="evaluate")
    line, = figure_of(tmp_path, "mismatch").axes[0].lines
    assert line.get_ydata().tolist() == pytest.approx([0.8, 2.0])


def test_growth(tmp_path):
    for digits in (8, 2, 4):
        phases = {"update": dict(seconds=digits**2, peak_memory_mb=None)}
        a_run(tmp_path, dict(phases=phases), mode="bench", digits=digits)
    axes, = figure_of(tmp_path, "growth").axes
    assert drawn(axes)["update"] == [[2, 4], [4, 16], [8, 64]]


def test_coloured_text(tmp_path):
    """Each character stands in its line and column over the colour of its certainty."""
    end = inspection(J=[0.5 + 0.03 * i for i in range(17)])
    a_run(tmp_path, end, mode="inspect")
    texts = figure_of(tmp_path, "coloured_text").texts[1:]  # after the title
    assert [text.get_text() for text in texts] == list(end["text"].replace("\n", "↵"))
    place = {text.get_position()[::-1] for text in texts}
    assert len(place) == 17 and len({y for y, _ in place}) == 3
    magma = plots.matplotlib.colormaps["magma"]
    for text, J in zip(texts, end["certainty"]):
        assert text.get_bbox_patch().get_facecolor() == pytest.approx(magma(2 * J - 1))


def test_a_very_long_answer_is_cut_with_a_note(tmp_path):
    a_run(tmp_path, inspection(text="ab\n" * 3000), mode="inspect")
    figure = figure_of(tmp_path, "coloured_text")
    assert "60 of 3000 lines" in figure.get_suptitle() and len(figure.texts) == 181


def inside(figure):
    """Titles, labels and legends are within the picture."""
    figure.draw_without_rendering()
    texts = [a for axes in figure.axes for a in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    suptitle = [figure._suptitle] if figure._suptitle else []
    boxes = [artist.get_window_extent() for artist in [*texts, *suptitle, *figure.legends]]
    edge = figure.bbox.padded(1)
    return all(edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1
               for box in boxes if box.width)


def test_long_and_odd_names_stay_inside(tmp_path):
    long = "$x_{" + "m" * 236
    a, b = "9" * 30, "8" * 30
    text = f"\n[{','.join(a)}] + [{','.join(b)}]\n"
    more = dict(mode="inspect", problem=f"{a}+{b}", checkpoint=long)
    a_run(tmp_path, inspection(f"{a}+{b}", text), **more)
    for seed in (0, 1):
        for name in (long, f"$|`<b>{long}"):
            policy = f"runs/{name}-seed{seed}"
            a_run(tmp_path, evaluation(0.9), mode="evaluate", checkpoint=policy, seed=seed)
    for mode in ("none", "standard", "critical"):
        a_run(tmp_path, success(0.9, 0.8), some_rows(), mode=mode, sampler_dtype=long)
    with plots.matplotlib.rc_context(plots.STYLE):
        for name in ("learning_curves", "accuracy_by_digits", "coloured_text"):
            assert inside(figure_of(tmp_path, name)), name
    groups = chosen(tmp_path, "accuracy_by_digits")
    assert "\\$\\|\\`\\<b>\\$x\\_{mm" in "".join(plots.table("x", groups, "definition.*"))


def test_what_is_missing_is_named(tmp_path, capsys, quick):
    a_run(tmp_path, success(0.9, 0.6), some_rows())
    out = tmp_path / "out"
    assert plots.main([str(tmp_path), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for name in plots.FIGURES:
        is_drawn = name in ("learning_curves", "critical_tokens")
        assert (f"{name}: not drawn, needs" in text) != is_drawn
        assert (out / f"{name}.pdf").exists() == (out / f"{name}.png").exists() == is_drawn
    rows = cells((out / "results.md").read_text().split("## learning")[0].split("\n"))
    assert rows == [["seeds", "1"], ["accuracy.N", "90"], ["accuracy.N+1", "60"],
                    ["pretrained\\_accuracy.N", "90"], ["pretrained\\_accuracy.N+1", "50"]]
    assert "| line1\\_first\\_n+1\\_comma.after | 75 |" in (out / "results.md").read_text()


def test_statistics():
    """Student's t by hand."""
    assert plots.interval([1.0, 3.0]).tolist() == pytest.approx([2.0, 12.706])
    assert plots.interval([0.5])[0] == 0.5 and math.isnan(plots.interval([0.5])[1])
    assert np.isnan(plots.interval([])).all()
    nine = plots.interval([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert nine == pytest.approx([5, 2.306 * math.sqrt(7.5) / 3])
    for n, t in ((10, 2.262), (12, 2.201), (21, 2.086), (31, 2.042)):
        half = plots.interval(list(range(n)))[1]
        assert half == pytest.approx(t * math.sqrt(n * (n + 1) / 12 / n), rel=2e-3)


# ---- answers.html

def page_of(root, **more):
    a_run(root, inspection("12+7") | more, mode="inspect")
    a_run(root, inspection("12+7") | more, mode="inspect", checkpoint="runs/critical-12-seed0")
    end = inspection("<script>alert(1)</script>") | more
    a_run(root, end, mode="inspect", checkpoint="runs/none-1-seed0")
    return plots.answers(plots.read_groups([str(root)]))


def test_the_page_of_answers_is_self_contained(tmp_path):
    page = page_of(tmp_path)
    assert not re.search(r"https?:|src=|@import|url\(|<link", page) and page.count("<script>") == 1
    data = json.loads(re.search(r"const answers = (.*);\n", page).group(1))
    assert [answer["title"] for answer in data] == [
        "12+7: pretrained, seed 0", "12+7: critical-12, seed 0",
        "<script>alert(1)</script>: none-1, seed 0"]
    assert data[1]["certainty"] == inspection()["certainty"]


class Browser:
    """A headless Chromium, spoken to by its debugging protocol."""
    def __init__(self, socket):
        self.socket, self.ids, self.events = socket, itertools.count(1), []

    async def call(self, method, **params):
        number = next(self.ids)
        await self.socket.write_message(json.dumps(dict(id=number, method=method, params=params)))
        while True:
            message = json.loads(await asyncio.wait_for(self.socket.read_message(), 30))
            if message.get("id") == number:
                return message["result"]
            self.events.append(message["method"])

    async def value(self, expression):
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    async def key(self, key):
        for kind in ("keyDown", "keyUp"):
            code = 9 if key == "Tab" else 0
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                            windowsVirtualKeyCode=code)

    async def point(self, name):
        x, y = await self.value("(r => [r.x + r.width / 2, r.y + r.height / 2])"
                                f"(document.getElementById('{name}').getBoundingClientRect())")
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return await self.value("about.hidden ? '' : about.innerText")


async def visit(page, port, shots):
    from tornado.httpclient import AsyncHTTPClient
    from tornado.websocket import websocket_connect
    for _ in range(100):
        try:
            found = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
            break
        except OSError:
            await asyncio.sleep(0.1)
    target = next(t for t in json.loads(found.body) if t["type"] == "page")
    address = target["webSocketDebuggerUrl"]
    browser = Browser(await websocket_connect(address, max_message_size=2**26))
    for domain in ("Runtime", "Log", "Page", "Network"):
        await browser.call(f"{domain}.enable")
    seen = {}
    for look, width in (("light", 1000), ("dark", 1000), ("phone", 390)):
        await browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800,
                           deviceScaleFactor=1, mobile=look == "phone")
        scheme = dict(name="prefers-color-scheme", value="dark" if look == "dark" else "light")
        await browser.call("Emulation.setEmulatedMedia", features=[scheme])
        await browser.call("Page.navigate", url=page.as_uri())
        ready = "document.readyState + document.querySelectorAll('pre').length"
        while await browser.value(ready) != "complete3":
            await asyncio.sleep(0.05)
        seen[look, "hover"] = await browser.point("1-3")
        seen[look, "colours"] = await browser.value(
            "(s => [s.backgroundColor, s.color])(getComputedStyle(document.querySelector('pre')))")
        seen[look, "wide"] = await browser.value("document.documentElement.scrollWidth")
        seen[look, "box"] = await browser.value(
            "(r => [r.left, r.top, r.right, r.bottom])(about.getBoundingClientRect())")
        if shots:
            import base64
            shot = await browser.call("Page.captureScreenshot")
            pathlib.Path(shots, look + ".png").write_bytes(base64.b64decode(shot["data"]))
    await browser.key("Escape")
    seen["escape"] = await browser.value("about.hidden")
    for key in ("Tab", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        await browser.key(key)
    seen["keys"] = await browser.value(
        "document.activeElement.id + ' ' + about.innerText.split('\\n')[0]")
    seen["changed"] = await browser.value(
        "[...document.querySelectorAll('pre .changed')].map(s => s.id)")
    bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    seen["errors"] = [event for event in browser.events if event in bad]
    await browser.call("Browser.close")
    return seen


def test_the_page_of_answers_in_a_browser(tmp_path):
    """Hovering and keys show the numbers of the file; no errors; light, dark and on a phone."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if not chromium:
        pytest.skip("no Chromium here: answers.html is not tried in a browser")
    pytest.importorskip("tornado")
    page = tmp_path / "answers.html"
    page.write_text(page_of(tmp_path / "runs"), encoding="utf-8")
    profile = tmp_path / "profile"
    process = subprocess.Popen(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = profile / "DevToolsActivePort"
        for _ in range(300):
            if port.exists() and port.read_text():
                break
            time.sleep(0.1)
        seen = asyncio.run(visit(page, int(port.read_text().split()[0]), os.environ.get("SHOTS")))
        process.wait(20)
    finally:
        process.kill()
    J = inspection()["certainty"][3]
    assert seen["errors"] == [] and seen["escape"] is True
    assert seen["changed"] == ["0-3", "1-3", "2-3"]
    for look in ("light", "dark", "phone"):
        lines = [line.split("\t") for line in seen[look, "hover"].split("\n") if line.strip()]
        assert lines[:3] == [[","], [f"J = {J:.4f}"], [f"J^β = {J**150:.4f}"]]
        assert [line for line in lines if len(line) == 4][-5:] == [
            [",", "75.00%", "x", "60.00%"], ["]", "12.50%", "<", "5.000%"],
            ["0", "6.250%", "0", "3.000%"], ["1", "3.000%", "1", "1.000%"],
            [",", "0.001000%", ",", "1.000%"]]
        width = 390 if look == "phone" else 1000
        left, top, right, bottom = seen[look, "box"]
        assert seen[look, "wide"] <= width
        assert 0 <= left and right <= width and 0 <= top and bottom <= 800
    assert seen["light", "colours"] != seen["dark", "colours"]
    assert seen["keys"] == "0-2 1"
