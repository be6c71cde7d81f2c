"""The command line: every command is listed with one line, and problems come out as one line, not as a traceback."""

import json
import re
import subprocess
import sys

import httpx2
import pytest

from trl_gptoss.cli import COMMANDS, main


def test_help_lists_every_command_and_imports_none():
    """In a process of its own, so that what is imported is seen."""
    code = (
        "import sys; from trl_gptoss.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert 'trl_gptoss.tiny' not in sys.modules and 'trl_gptoss.report' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, command in COMMANDS.items():
        assert re.search(rf"^ +{name}\s+{re.escape(command.help)}$", out, re.MULTILINE), f"{name}\n{out}"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit) as e:
        main([name, "--help"])
    assert e.value.code == 0
    assert f"trl-gptoss {name}" in capsys.readouterr().out


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "trl_gptoss", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: trl-gptoss ")


def test_unknown_commands_and_none_are_wrong_usage(capsys):
    for argv in ([], ["fly"]):
        with pytest.raises(SystemExit) as e:
            main(argv)
        assert e.value.code == 2


def test_report(tmp_path, capsys):
    state = {"global_step": 1, "log_history": [{"step": 1, "loss": 0.5}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()


def test_a_missing_run_is_one_line_and_status_1(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("trl-gptoss report: ") and "does not exist" in err and err.count("\n") == 1


def test_what_the_system_or_the_hub_refuses_is_one_line_and_status_1(tmp_path, capsys, monkeypatch):
    def refuse(args):
        raise NotADirectoryError(20, "Not a directory", str(tmp_path / "file"))

    monkeypatch.setattr("trl_gptoss.report.command.run", refuse)
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("trl-gptoss report: [Errno 20] Not a directory")


def test_the_extra_of_adapters_and_a_lost_network_are_named_and_our_own_mistakes_keep_their_traceback(
    tmp_path, capsys, monkeypatch
):
    raised: list[Exception] = []

    def fail(args):
        raise raised[-1]

    monkeypatch.setattr("trl_gptoss.report.command.run", fail)
    for error, said in (
        (ModuleNotFoundError("No module named 'peft'", name="peft"), "pip install 'trl-gptoss[peft]'"),
        (httpx2.ConnectError("Name or service not known"), "there is no connection"),
    ):
        raised.append(error)
        assert main(["report", str(tmp_path)]) == 1
        assert said in capsys.readouterr().err
    raised.append(KeyError("ours"))
    with pytest.raises(KeyError):
        main(["report", str(tmp_path)])


@pytest.mark.parametrize("command", [["export", "{}", "out"], ["eval", "retool", "{}"], ["doctor", "{}"]])
@pytest.mark.parametrize("place", ["/nowhere", "./nothing", "a/b/c"])
def test_a_folder_that_does_not_exist_is_said_to_be_one(command, place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([part.format(place) for part in command]) == 1
    error = capsys.readouterr().err
    assert "there is no such folder" in error and f"'{place}'" in error and "Traceback" not in error


def test_a_wrong_tiny_model_is_one_line_and_status_1(tmp_path, capsys):
    assert main(["tiny-model", str(tmp_path / "out"), "--tokenizer", "gpt-oss", "--cache-dir", str(tmp_path)]) == 1
    assert "--tokenizer-path" in capsys.readouterr().err


def test_env_is_what_a_bug_report_needs(capsys, monkeypatch):
    import transformers

    monkeypatch.setenv("TRL_GPTOSS_ATTENTION", "reference")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:secret-of-mine@example.com/hub")
    monkeypatch.setenv("LOCAL_KERNELS", "kernels-community/sink-fa3=/home/me/kernel")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    lines = {
        label: value.strip() for label, value in (re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines())
    }
    assert lines["transformers"] == transformers.__version__ and lines["TRL_GPTOSS_ATTENTION"] == "reference"
    assert "grad_input: " in lines["experts"]
    assert lines["attention"].startswith("reference on ") and lines["attention: reference"] == "usable"
    for label in (
        "platform",
        "python",
        "cpus",
        "memory",
        "cuda",
        "driver",
        "nvcc",
        "kernel library",
        "sandbox",
        "kernels",
    ):
        assert lines[label], label
    assert "secret-of-mine" not in out and "/home/me" not in out


def test_env_says_why_a_forced_backend_cannot_run(capsys, monkeypatch):
    monkeypatch.setenv("TRL_GPTOSS_ATTENTION", "warp")
    assert main(["env"]) == 0
    assert "names no backend" in capsys.readouterr().out
