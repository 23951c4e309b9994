"""The risk: a guide that names a command, a flag or a switch that there isn't, or says less in one language."""

from __future__ import annotations

import functools
import inspect
import json
import re
import shlex
import subprocess
import sys

import pytest
import typer

from engine.switches import OTHER_SWITCHES, SETTINGS
from gates.registry import GATES
from kvring_cli.app import app, call
from kvring_cli.cards import find_card
from kvring_cli.commands.bench import bench
from kvring_cli.guide import CARDS, LANGUAGES, TIMED_CONTEXT, TOPICS, page, read
from kvring_cli.receipt.redact import flags_of
from kvring_cli.shapes import PUBLISHED

PAGES = [(topic, language) for topic in TOPICS for language in LANGUAGES]
FOREIGN = re.compile(r"^\| (.+?) \|", re.M)  # the first column of the tables `there | here`
ENGLISH, CHINESE = LANGUAGES


@pytest.fixture(scope="module")
def parsed():
    """parsed(line): which command a line reaches, with every value checked as the command line checks it."""
    reached: list[str] = []

    def stub(command):
        @functools.wraps(command)
        def reach(*_, **values):
            reached.append(command.__name__.replace("_", "-"))

        reach.__signature__ = inspect.signature(command, eval_str=True)
        reach.__annotations__ = {name: one.annotation for name, one in reach.__signature__.parameters.items()}
        del reach.__wrapped__
        return reach

    def copy(original):
        made = typer.Typer(add_completion=False)
        for command in original.registered_commands:
            made.command(command.name)(stub(command.callback))
        return made

    whole = copy(app)
    whole.add_typer(copy(bench), name="bench")

    def parse(line):
        reached.clear()
        whole(args=shlex.split(line)[1:], prog_name="kvring", standalone_mode=False)
        return reached[-1]

    return parse


@functools.cache
def text(topic, language):
    return page(topic, language)


def commands(markdown):
    """Command lines of the code blocks, and those in running text that are whole."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", markdown, re.M | re.S))
    inline = re.findall(r"`(kvring [^`]+)`", markdown)
    return [line for line in [*blocks.splitlines(), *inline] if line.startswith("kvring ")]


def here(markdown):
    """A page without what it says of other programs: the first column of its tables `there | here`."""
    parts = re.split(r"^## ", markdown, flags=re.M)
    foreign = [part for part in parts if "| there | here |" in part or "| 那边 | 这里 |" in part]
    return "".join(FOREIGN.sub("|", part) if part in foreign else part for part in parts)


@pytest.mark.parametrize(("topic", "language"), PAGES)
def test_every_command_line_parses(topic, language, parsed):
    found = commands(text(topic, language))
    assert found
    for line in found:
        try:
            name = parsed(line)
        except Exception as error:
            pytest.fail(f"{line}: {error}")
        assert line.split()[1] in (name, "bench")


LOOKS = ("doctor", "guide", "inspect", "pick-engine", "plan", "receipt", "run MODEL")
"""Beginnings of lines that end by themselves, without other programs, in seconds."""


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_command_line_that_only_looks_runs(language, tmp_path, monkeypatch, capsys):
    """The test object stands for MODEL. What serves, gates and measures is run by the tests of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVRING_RECORD", "0")
    (tmp_path / "notes.txt").write_text("The code of the mill is MUSE-4711.")
    lines = {line for topic in TOPICS for line in commands(text(topic, language))}
    ran = sorted(line for line in lines if line.startswith(tuple(f"kvring {start}" for start in LOOKS)))
    assert len(ran) > 20
    for line in ran if language == ENGLISH else ran[::8]:  # the lines are the same in both: another test
        words = ["phantom" if word == "MODEL" else word for word in shlex.split(line)[1:]]
        assert call(words) == 0, f"{line}: {capsys.readouterr().err}"
    assert (tmp_path / "receipt.txt").exists() or language == CHINESE


def test_a_line_that_does_not_parse_is_seen(parsed):
    for line in (
        "kvring serv MODEL",
        "kvring serve",
        "kvring serve MODEL --kv-windw 8",
        "kvring serve MODEL --sink many",
    ):
        with pytest.raises(Exception, match=r"."):
            parsed(line)


@pytest.mark.parametrize(("topic", "language"), PAGES)
def test_every_flag_and_switch_is_one(topic, language):
    callbacks = [command.callback for command in (*app.registered_commands, *bench.registered_commands)]
    flags = {name for callback in callbacks for name, _ in flags_of(callback)} | {"--index-url", "--force-reinstall"}
    switches = {setting.switch for setting in SETTINGS} | {
        *OTHER_SWITCHES,
        "KVRING_API_KEY",
        "KVRING_RECORD",
        "NINFER_",
    }
    markdown = here(text(topic, language))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", markdown)) <= flags
    assert set(re.findall(r"\b(?:NINFER|KVRING)_[A-Z_]*", markdown)) <= switches


@pytest.mark.parametrize(("topic", "language"), PAGES)
def test_no_blank_is_left_and_no_gate_or_topic_is_invented(topic, language):
    markdown = text(topic, language)
    assert "{{" not in markdown and "}}" not in markdown
    assert set(re.findall(r"kvring gate ([a-z-]+)", markdown)) <= set(GATES)
    assert set(re.findall(r"kvring guide ([a-z0-9]+)", markdown)) <= set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_both_languages_say_the_same_things(topic):
    first, second = text(topic, ENGLISH), text(topic, CHINESE)
    for shape in (
        r"^(#+) ",  # headings, by level
        r"^```(.*?)^```",  # code, word by word
        r"^\|(?: *-+ *\|)+$",  # tables, by columns
        r"^(- \*\*)",
    ):
        assert re.findall(shape, first, re.M | re.S) == re.findall(shape, second, re.M | re.S)
    assert first.count("\n|") == second.count("\n|")
    assert sorted(set(inline(first)) - {"Shared GPU memory"}) == sorted(set(inline(second)) - {"共享 GPU 内存"})
    assert re.search(r"[\u4e00-\u9fff]", second) and not re.search(r"[\u4e00-\u9fff]", first)


def inline(markdown):
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S))


def test_the_switches_page_has_every_setting_in_both_languages():
    for language in LANGUAGES:
        for setting in SETTINGS:
            names = f"- `{setting.flag}`" + (f", `--no-{setting.flag[2:]}`" if setting.boolean else "")
            names += f", `{setting.switch}`" if setting.switch else ""
            line = next(line for line in text("switches", language).splitlines() if line.startswith(names))
            assert setting.show(setting.default) in line and (setting.boolean or setting.values in line)


def test_every_settings_meaning_is_translated_and_no_others():
    import yaml

    assert set(yaml.safe_load(read(CHINESE, "settings.yaml"))) == {setting.field for setting in SETTINGS}


@pytest.mark.parametrize("card", CARDS)
def test_figures_of_a_card_are_the_planners_own(card):
    markdown = text(card, ENGLISH)
    asked = ["plan", "qwen3-4b", "--card", card, "--ram", "32GiB", "--weights", "q4_k", "--json"]
    done = subprocess.run([sys.executable, "-m", "kvring_cli.app", *asked], capture_output=True)
    assert find_card(card).key in markdown and "Not measured" in markdown
    largest = json.loads(done.stdout)["largest_context"]
    row = next(line for line in markdown.splitlines() if line.startswith("| qwen3-4b |"))
    assert row.split(" | ")[4] == (f"{largest:,}" if largest else "does not fit")


@pytest.mark.parametrize(("card", "model", "weights"), [("8gb", "27b-2.1bit", "auto"), ("12gb", "qwen3-8b", "q4_k")])
def test_predicted_times_of_a_card_are_what_plan_prints_and_nobody_is_said_to_have_measured_them(card, model, weights):
    for language in LANGUAGES:
        row = next(row for row in tables(text(card, language))[1] if row[0] == model)
        asked = ["plan", model, "--card", card, "--weights", weights, "--max-context", row[2].replace(",", "")]
        done = subprocess.run([sys.executable, "-m", "kvring_cli.app", *asked], capture_output=True, check=True)
        said = done.stdout.decode()
        figures = [r"prefill .* s \((\S+) tokens/s", r"decode (\S+) tokens/s", r"second turn (\S+ s) to"]
        assert row[3:] == [re.search(figure, said)[1] for figure in figures]
        origin = re.search(r"^ +from (.+?)(; |$)", said, re.M)[1]
        assert f"`{origin}`" in text(card, language) and "nobody ran kvring on this card" in origin
        assert ("Predictions: nobody measured" if language == ENGLISH else "都是预测：没有人") in text(card, language)


@pytest.mark.parametrize("card", CARDS)
def test_every_model_of_a_card_has_its_times_or_why_not(card):
    fits, times = tables(text(card, ENGLISH))
    assert {row[0] for row in times} == {row[0] for row in fits} == set(PUBLISHED)
    for row in times:
        never = "does not fit" if not row[2] else "unknown" if row[0].startswith("gemma") else None
        assert all(cell == never for cell in row[3:]) if never else all(re.match(r"[\d.,]+", cell) for cell in row[3:])
        assert int(row[2].replace(",", "") or 0) <= TIMED_CONTEXT


def tables(markdown):
    """The rows of each table, without its head."""
    found = re.findall(r"^\|.*(?:\n\|.*)*", markdown, re.M)
    return [[row.strip("|").strip().split(" | ") for row in table.split("\n")[2:]] for table in found]


def test_piped_it_is_markdown_and_the_list_names_every_topic():
    kvring = [sys.executable, "-m", "kvring_cli.app", "guide"]
    done = subprocess.run([*kvring, "trouble", "--lang", "zh"], capture_output=True, check=True)
    assert done.stdout.decode() == text("trouble", CHINESE)
    listed = subprocess.run(kvring, capture_output=True, check=True).stdout.decode()
    assert [line.split()[2] for line in listed.splitlines()] == list(TOPICS)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_list_shows_each_pages_own_heading_without_working_the_page_out(language):
    kvring = [sys.executable, "-X", "importtime", "-m", "kvring_cli.app", "guide", "--lang", language]
    done = subprocess.run(kvring, capture_output=True, check=True)
    found = {line.split()[2]: line.split(maxsplit=3)[3] for line in done.stdout.decode().splitlines()}
    assert found == {topic: text(topic, language).splitlines()[0].removeprefix("# ") for topic in TOPICS}
    assert len(set(found.values())) == len(TOPICS)
    assert not re.search(rb"\| +torch\r?$", done.stderr, re.M)


@pytest.mark.parametrize(("value", "title"), [("zh_CN.GBK", "排错"), ("en_US.UTF-8", "Trouble"), ("", "Trouble")])
def test_the_language_follows_the_locale(value, title, monkeypatch, capsys):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", value)
    assert call(["guide", "trouble"]) == 0
    assert title in capsys.readouterr().out


def test_a_topic_that_is_not_there_names_the_nearest(capsys):
    assert call(["guide", "trubble"]) == 1
    assert "did you mean trouble?" in capsys.readouterr().err


def test_a_topic_is_found_however_it_is_written(capsys):
    assert call(["guide", "Trouble", "--lang", "en"]) == 0
    assert capsys.readouterr().out == text("trouble", ENGLISH)
    assert page("12GB").startswith("# A card of 12 GB")


def test_a_language_that_is_not_there_is_bad_usage_in_plain_words(capsys):
    assert call(["guide", "--lang", "fr"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: Invalid value for '--lang'") and "'en', 'zh'" in said and "Value error" not in said
