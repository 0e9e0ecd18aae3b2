"""Tests of collect.py and tables.py, and that the texts say what notebooks/data/ holds."""
import csv
import json
from dataclasses import asdict

import collect
import critkl
import pytest
import sentences
import tables


# ---- The texts as they are.

@pytest.mark.parametrize("file", sentences.SENTENCES)
def test_the_text_says_what_the_files_hold(file):
    """If this fails: python notebooks/tables.py, and read what it changed."""
    data = collect.load()
    if not data.runs:
        pytest.skip("notebooks/data/runs.csv is not there")
    text = (collect.ROOT / file).read_text(encoding="utf-8")
    new, missing = tables.fill(text, file, data)
    assert not missing
    assert new.splitlines() == text.splitlines()

@pytest.mark.parametrize("file, words", [
    (file, words) for file, found in sentences.SENTENCES.items() for words, _ in found])
def test_each_sentence_is_in_its_text_once(file, words):
    text = (collect.ROOT / file).read_text(encoding="utf-8")
    assert len(tables.pattern(words).findall(text)) == 1

@pytest.mark.parametrize("file", sentences.SENTENCES)
def test_no_number_in_the_text_is_written_by_hand(file):
    """If this fails: name the sentence in sentences.py, or allow the phrase there."""
    text = (collect.ROOT / file).read_text(encoding="utf-8")
    assert tables.uncovered(text, file) == []

def test_tables_are_known_and_the_texts_have_the_main_ones():
    found = [name for file in sentences.SENTENCES for name in
             tables.MARKED.findall((collect.ROOT / file).read_text(encoding="utf-8"))]
    names = [name for name, _ in found]
    assert set(names) <= {*tables.TABLES, *collect.load().noted} and len(names) == len(set(names))
    assert set(collect.load().noted) <= set(names)
    assert {"readme", "example", "seeds", "commas", "gap"} <= set(names)


# ---- The machinery, on made-up runs.

def three(mean):
    return [mean, mean - 0.01, mean + 0.01]

def write_config(folder, given):
    settings = asdict(critkl.make_config(given | dict(out=str(folder.parent))))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(
        python="3.11.7", torch="2.13.0+cpu", settings=settings)))

def write_run(folder, N, longer, reward=0.5, **given):
    """A finished run; before RL it was at 0.9 and 0.4, the commas at 0.8."""
    write_config(folder, given)
    tokens = {f"line{line}_{which}_n+1_comma": dict(before=0.8, after=0.9)
              for line in (1, 2, 3) for which in ("first", "second")}
    tokens["line1_first_n+1_digit"] = dict(before=0.0, after=0.0)
    summary = dict(
        intervals=dict(accuracy={"N": three(N), "N+1": three(longer)},
                       pretrained_accuracy={"N": three(0.9), "N+1": three(0.4)}),
        critical_tokens=tokens, seconds=dict(pretrain=100, rl=50, total=150), peak_memory_mb=700.0,
        parameters=100993)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.csv").write_text(
        "iteration,reward,masked,bad,drift_min\n0,,,,\n"
        f"1,0.25,0.01,0.001,-0.5\n2,{reward},0.03,0.003,-0.7\n")
    return summary

def write_evaluation(folder, success=0.31, **given):
    write_config(folder, dict(mode="evaluate") | given)
    kinds = dict(sampled=three(success), greedy=three(0.99), expected=three(success))
    (folder / "evaluation.json").write_text(json.dumps(dict(
        rows=[dict(set=lengths, digits=digits) | kinds
              for lengths in ("identical", "varying") for digits in critkl.SETS],
        certainty_gap={"critical": [-0.07, -0.08, -0.06], "critical commas": three(-0.14),
                       "non-critical": three(0.002)},
        definition={"listed": 378, "listed and decisive": 300, "uncertain": 180,
                    "uncertain and decisive": 175, "listed and uncertain": 178, "all three": 174},
        sampler=[])))

@pytest.fixture
def runs(tmp_path):
    """Two seeds of each penalty: critical ends 0.9 and 0.8 at N+1, standard 0.5 and 0.6."""
    for seed in (0, 1):
        for mode, N, longer in (("none", 0.7, 0.9), ("standard", 0.9, 0.5 + seed / 10),
                                ("critical", 0.95, 0.9 - seed / 10)):
            write_run(tmp_path / f"runs/{mode}{seed}", N, longer, mode=mode, seed=seed)
    return tmp_path / "runs"

def collected(runs, note=""):
    data = runs.parent / "data"
    collect.collect([runs], data, note)
    return collect.load(data)

def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))

def test_collect_keeps_what_differs_and_replaces_the_same(runs):
    write_run(runs / "alpha", 0.9, 0.7, alpha=0.2, threads=2)
    (runs / "unfinished").mkdir()
    (runs / "unfinished" / "config.json").write_text("{}")
    collected(runs)
    path = runs.parent / "data" / "runs.csv"
    first, rows = path.read_bytes(), rows_of(path)
    assert len(rows) == 7
    assert [(row["alpha"], row["threads"]) for row in rows].count(("0.2", "2")) == 1
    assert rows[0]["parameters"] == "100993" and "beta" not in rows[0] and "out" not in rows[0]
    assert str(runs) not in path.read_text()
    collected(runs)
    assert path.read_bytes() == first
    other = runs.parent / "later"
    write_run(other / "again", 0.9, 0.75, alpha=0.2, threads=2)
    collected(other)
    assert [row["N+1 after"] for row in rows_of(path) if row["alpha"] == "0.2"] == ["0.75"]
    assert len(rows_of(path)) == 7

def test_main_tables(runs):
    data = collected(runs)
    assert tables.readme(data)[:2] == [
        ["two seeds, 1,000 problems each", "N", "N+1", "right n+1 commas"],
        ["pretrained", "90.0 ± 0.0", "40.0 ± 0.0", "80.0 ± 0.0"]]
    assert tables.seeds(data)[-1] == [  # t = 12.706, standard deviation 7.07, over sqrt(2)
        "critical", 2, "95.0 ± 0.0", "85.0 ± 63.5", "90.0 ± 0.0", "95 / 90, 95 / 80"]
    assert tables.commas(data)[1] == ["pretrained", *["80.0"] * 6]
    assert collect.paired(collect.pick(data.runs, mode="critical"),
                          collect.pick(data.runs, mode="standard")) == "30.0 ± 127.1"

def test_example_is_what_a_run_prints(runs):
    summary = json.loads((runs / "critical0" / "summary.json").read_text())
    printed = critkl.summary_text(summary, critkl.make_config({})).strip().splitlines()
    assert tables.example(collected(runs)).splitlines() == ["```", *printed[:-1], "```"]

def test_most_problems_and_the_default_machine_count(runs):
    write_run(runs / "few", 0.1, 0.1, test_problems=100)
    data = collected(runs)
    write_run(runs.parent / "other/run", 0.2, 0.2)
    with_note = collected(runs.parent / "other", "ATEN_CPU_CAPABILITY=default")
    for data in (data, with_note):
        assert collect.values(collect.pick(data.runs, mode="critical"), "N after") == [95, 95]
    assert tables.processors(with_note)[1:] == [
        ["as it is, one thread", "90.0 / 40.0 / 80.0", "95.0 / 90.0 / 90.0", "90.0 / 50.0 / 90.0"],
        ["ATEN_CPU_CAPABILITY=default, one thread", "90.0 / 40.0 / 80.0", "20.0 / 20.0 / 90.0", ""]]

def test_compare_takes_the_seeds_that_a_row_shares(runs):
    write_run(runs / "a", 0.9, 0.7, alpha=0.2)
    write_run(runs / "b", 0.9, 0.6, alpha=0.2, mode="standard")
    write_run(runs / "c", 0.9, 0.6, alpha=20.0, seed=1)
    write_run(runs / "d", 0.9, 0.6, alpha=5.0, beta=10.0)   # differs in two: not in the table
    table = tables.compare(collected(runs), "alpha")
    assert [row[:2] for row in table[1:]] == [["0.2", 1], ["2", 2], ["20", 1]]
    assert table[1][2:] == ["90.0 / 40.0", "70.0 / 90.0", "90.0 / 60.0", "90.0 / 70.0", "10.0"]
    assert table[3][2:] == ["90.0 / 40.0", "70.0 / 90.0", "", "90.0 / 60.0", ""]

def test_map_degrees_certainty_and_regions(runs):
    write_run(runs / "a", 0.9, 0.7, alpha=0.2, lr=1e-3, iterations=100)
    write_run(runs / "b", 0.9, 0.7, dial=0.1, mistakes=0.0, pretrain_steps=700)
    write_run(runs / "c", 0.9, 0.7, certainty="max_prob", certainty_temperature=4.0)
    write_run(runs / "d", 0.9, 0.7, mode="none", method="dppo")
    write_run(runs / "e", 0.9, 0.8, mode="dppo", seed=1)
    write_run(runs / "f", 0.9, 0.7, method="dppo", divergence="binary_kl", delta=0.05)
    data = collected(runs)
    table = {name: tables.TABLES[name](data) for name in ("map", "degrees", "certainty", "crossed")}
    assert table["map"][-1][:4] == ["100", "0.001", "0.2", 1]
    assert table["degrees"][1][:4] == ["0.1", "0", "700", 1]
    assert table["certainty"][1][:4] == ["max_prob", "4", "1", 1]
    assert [row[:2] for row in table["crossed"][1:]] == [
        ["`dppo`", 2], ["`dppo`, divergence binary_kl, delta 0.05", 1], ["`ppo`", 2]]
    with pytest.raises(tables.Missing):
        tables.TABLES["beta"](data)

def test_methods_on_fixed_problems(runs):
    strain = dict(mode="none", fixed=32, staleness=4, sampler_dtype="bfloat16", iterations=24)
    write_run(runs / "a", 0.9, 0.7, 0.75, **strain)
    write_run(runs / "b", 0.9, 0.7, 0.5, **strain, method="negative_only", delta=0.8)
    write_run(runs / "c", 0.9, 0.7, mode="none", fixed=8)
    assert tables.methods(collected(runs))[1:] == [
        ["`negative_only`, delta 0.8", 1, "25.0", "50.0", "-25.0", "90.0", "70.0", "-60", "2.00",
         "0.200"],
        ["`ppo`", 1, "25.0", "75.0", "", "90.0", "70.0", "-60", "2.00", "0.200"]]

def test_tables_of_evaluations(runs):
    write_evaluation(runs / "evaluate0")
    write_run(runs / "sharp", 0.9, 0.7, alpha=0.2)
    for folder in ("critical0", "sharp", "gone-12ab-seed0"):
        write_evaluation(runs / f"evaluate-{folder}", 0.9, checkpoint=f"somewhere/{folder}")
    write_evaluation(runs / "released", certainty="max_prob", certainty_temperature=4.0)
    data = collected(runs)
    assert tables.gap(data)[1][1:3] == 2 * ["-0.070 (-0.080 to -0.060)"]
    table = tables.digits(data)
    assert table[1][:4] == ["pretrained", "sampled", "31.0", "31.0"]
    assert table[4][:4] == ["critical", "greedy", "99.0", "99.0"]
    assert [row[0] for row in table[3:-1:2]] == ["critical", "critical, alpha 0.2", "gone-12ab"]
    assert sentences.definition(data) == ["one", "378", "180", "175", "174", "99"]
    assert sentences.answers(data) == ["31.0", "99.0"]
    write_evaluation(runs / "evaluate1", dial=0.1)
    table = tables.evidence(collected(runs))
    assert table[1] == ["0.1", "negentropy", "0", 1, "-0.140", "0.002", "180", "175", "178", "174",
                        "300"]

WORDS = "At alpha = {} critical ends {} points above ({} seeds)"

@pytest.fixture
def one_sentence(monkeypatch):
    numbers = ["2", "1.5 ± 0.5", "nine"]
    monkeypatch.setitem(sentences.SENTENCES, "text", [(WORDS, lambda data: numbers)])

def test_fill_replaces_numbers_across_lines_and_wraps(one_sentence):
    before = "- An item.\n- At alpha =\n  20 critical ends 37 ±\n  4.0 points above (two seeds)"
    text, missing = tables.fill(f"# Title\n\n{before}\n\nAfter.\n", "text", None)
    assert not missing
    assert "alpha =\n  2 critical ends 1.5 ± 0.5 points" in text and "(nine seeds)" in text
    long = (f"- {50 * 'x'}\n- {40 * 'y'} At alpha = 2 critical ends 3 points above (two seeds) "
            "yes no .")
    text, _ = tables.fill(f"{long}\n\n```\n{200 * 'z'}\n```\n", "text", None)
    assert text.splitlines()[:3] == [
        f"- {50 * 'x'}", f"- {40 * 'y'} At alpha = 2 critical ends 1.5 ± 0.5 points above (nine",
        "  seeds) yes no ."]
    assert f"\n{200 * 'z'}\n" in text
    assert tables.fill(text, "text", None)[0] == text
    longer = f"{98 * 'x'} y\nAt alpha = 2 critical ends 3 points above (nine seeds)\n\n{120 * 'z'}"
    assert tables.fill(longer, "text", None)[0] == longer.replace("ends 3", "ends 1.5 ± 0.5")

def test_markdown_and_wrapping():
    assert tables.markdown([["", "a"], ["b", 1], ["", ""]]).splitlines() == [
        "| | a |", "|---|---|", "| b | 1 |", "| | |"]
    assert tables.wrap(f"{90 * 'x'} ab 94 / 93 or", 100) == f"{90 * 'x'} ab\n94 / 93 or"

def test_fill_says_what_it_cannot_make(one_sentence, runs):
    text = "<!-- table: beta -->\n| old |\n\n<!-- table: readme -->\n\nNo sentence.\n"
    new, missing = tables.fill(text, "text", collected(runs))
    assert new.startswith("<!-- table: beta -->\n| old |\n\n<!-- table: readme -->\n| two seeds, ")
    assert [line.partition(":")[2][:12] for line in missing] == [" table beta:", " 'At alpha ="]

def test_uncovered_numbers(one_sentence):
    text = ("At alpha = 2 critical ends 3 points above (two\nseeds). Flag `--x 3`, N+1.\n\n"
            "<!-- table: readme -->\n| 1 |\n| 2 |\n\nBut 4.5 here.\n")
    found, = tables.uncovered(text, "text")
    assert found.endswith("Flag #, #. But 4.5 here.")

def test_user_errors_are_one_line(tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{}")
    (tmp_path / "bad" / "summary.json").write_text("{}")
    data = ["--data", str(tmp_path / "data")]
    for argv in ([str(tmp_path / "none"), *data], [str(tmp_path / "bad"), *data]):
        with pytest.raises(SystemExit) as error:
            collect.main(argv)
        assert error.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as error:
        tables.main(["other"])
    assert error.value.code == 2
