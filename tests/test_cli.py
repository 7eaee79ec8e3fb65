"""The command line: one line and the promised exit code for bad input, in every environment."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pptune import cli
from pptune.files import save
from pptune.model import ModelSpec
from pptune.plans_file import PlansFile, load_plans
from pptune.profiles import Parallel, Profile, save_profile
from tests.sample_documents import sample_validation
from tests.synthetic import synthetic_profile, uniform_link

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "profile", "search", "validate", "tune", "predict", "explain", "show", "export", "doctor",
)  # fmt: skip
NUMBERS = ("predict", "--forward", "1", "--backward", "2", "--transfer", "0.1", "--ranks", "4")

GPT = ModelSpec(
    name="small", family="gpt", num_layers=8, seq_len=128, hidden_size=32, num_heads=4,
    num_kv_heads=4, ffn_size=128, vocab_size=61,
)  # fmt: skip

Run = tuple[int, str, str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a profile of 8 blocks on 2 ranks, as the current one."""
    monkeypatch.chdir(tmp_path)
    save_profile(small_profile(), tmp_path / "profile.json")
    return tmp_path


def small_profile() -> Profile:
    return synthetic_profile(
        num_layers=8, block=lambda b: (1e-3 + 0.3e-3 * b, 2e-3 + 0.6e-3 * b), num_ranks=2,
        links=(uniform_link(1e-4, 1e9),), activation_bytes=2**20, boundary_bytes=2**16,
        parameter_bytes=2**20, memory_bytes=2**34, model=GPT,
    )  # fmt: skip


def pptune(capsys: pytest.CaptureFixture[str], *arguments: str) -> Run:
    """Exit code, stdout and stderr of a command, run in this process."""
    before = sys.argv
    sys.argv = ["pptune", *arguments]
    try:
        code = cli._run()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return code, out, err


def start(
    *arguments: str, cwd: Path, variables: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """A command as its own process, importing this repository's pptune."""
    environment = {
        **{name: os.environ[name] for name in os.environ.keys() - {"NO_COLOR", "COLUMNS"}},
        "PYTHONPATH": str(ROOT),
        **(variables or {}),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "pptune", *arguments], cwd=cwd, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> Run:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


# --- bad input ------------------------------------------------------------------------------------

BAD: list[tuple[int, str, tuple[str, ...]]] = [
    # (exit code, part of the message, command line)
    (2, r"profile nothing\.json does not exist; give the path",
     ("search", "nothing.json", "--global-batch-size", "8")),
    (2, r"broken\.json: not valid JSON", ("search", "broken.json", "--global-batch-size", "8")),
    (2, r"profile\.json: this is a 'profile' file; expected a plans file",
     ("validate", "profile.json")),
    (2, "--global-batch-size is 0; it must be 1",
     ("search", "profile.json", "--global-batch-size", "0")),
    (1, r"\(8\) is not divisible by the micro-batch size \(3\)",
     ("search", "profile.json", "--global-batch-size", "8", "--micro-batch-sizes", "3")),
    (2, "--ranks is 0", ("search", "profile.json", "--global-batch-size", "8", "--ranks", "0")),
    (2, "--zero is 7; use 0 or 1",
     ("search", "profile.json", "--global-batch-size", "8", "--zero", "7")),
    (1, "8 layers cannot fill 64 stages",
     ("search", "profile.json", "--global-batch-size", "8", "--ranks", "64")),
    (2, "--schedules 'foo' is unknown; use some of gpipe, 1f1b",
     ("search", "profile.json", "--global-batch-size", "8", "--schedules", "foo")),
    (2, "--target 'foo' is unknown",
     ("search", "profile.json", "--global-batch-size", "8", "--target", "foo")),
    (2, "--objective 'fun' is unknown; use time, memory, pareto",
     ("search", "profile.json", "--global-batch-size", "8", "--objective", "fun")),
    (2, "--chunks 'two' is not a list of whole numbers; write 1,2,4",
     ("search", "profile.json", "--global-batch-size", "8", "--chunks", "two")),
    (2, "cannot write /proc/x/plans.json",
     ("search", "profile.json", "--global-batch-size", "8", "-o", "/proc/x/plans.json")),
    (2, r"1f1b on torch needs micro-batches \(1\) to be at least",
     ("predict", "profile.json", "--microbatches", "1")),
    (2, r"needs micro-batches \(9\) to be a multiple of rounds \(2\) with 4 ranks; use 8 or 10",
     ("predict", "profile.json", "--ranks", "4", "--chunks", "2", "--microbatches", "9")),
    (2, "--schedule 'foo' is unknown", ("predict", "profile.json", "--microbatches", "8",
                                        "--schedule", "foo")),
    (2, "--chunks is -1", ("predict", "profile.json", "--microbatches", "8", "--chunks", "-1")),
    (2, "--ranks is 0", ("predict", "profile.json", "--microbatches", "8", "--ranks", "0")),
    (2, "--recompute 'half' is unknown; use none, full",
     ("predict", "profile.json", "--microbatches", "8", "--recompute", "half")),
    (2, "--layers-per-stage places 9 layers, but the model has 8",
     ("predict", "profile.json", "--microbatches", "8", "--layers-per-stage", "4,5")),
    (2, "200000000 actions per step", ("predict", "profile.json", "--microbatches", "100000000")),
    (2, "--microbatches is missing", ("predict", "profile.json")),
    (2, "give a PROFILE, or --forward", ("predict", "--microbatches", "8")),
    (2, "--forward '-1' is negative", ("predict", "--forward", "-1", "--ranks", "4",
                                       "--microbatches", "8")),
    (2, "unknown unit 'parsec'", ("predict", "--forward", "1parsec", "--ranks", "4",
                                  "--microbatches", "8")),
    (2, "did you mean llama-2-70b", ("profile", "llama-2-70c")),
    (2, "--seq-len is 0", ("profile", "--seq-len", "0")),
    (2, "--print-launch 'pbs' is unknown; use slurm or torchrun", ("profile", "--print-launch",
                                                                   "pbs")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "message", "line"), BAD, ids=lambda each: "")
def test_bad_input_is_named_in_a_line_with_what_to_change(
    here: Path, capsys: pytest.CaptureFixture[str], code: int, message: str, line: tuple[str, ...]
) -> None:
    (here / "broken.json").write_bytes((here / "profile.json").read_bytes()[:500])
    before = {each.name for each in here.iterdir()}
    done, out, err = pptune(capsys, *line)
    assert (done, out) == (code, "")
    assert err.startswith("error: ")
    assert re.search(message, err), err
    # A "no" may list its reasons below the line; nothing else has more than one.
    assert len(err.splitlines()) == 1 or code == 1
    assert {each.name for each in here.iterdir()} == before


@pytest.mark.parametrize(
    "line",
    [("frobnicate",), ("search",), ("search", "profile.json", "--colour"),
     ("predict", *NUMBERS[1:], "--microbatches", "many")],
)  # fmt: skip
def test_a_wrong_command_line_is_exit_2_without_traceback(
    here: Path, capsys: pytest.CaptureFixture[str], line: tuple[str, ...]
) -> None:
    code, out, err = pptune(capsys, *line)
    assert (code, out) == (2, "")
    assert "Usage: pptune" in err
    assert "Traceback" not in err


def plans_here(capsys: pytest.CaptureFixture[str]) -> PlansFile:
    code, _, err = pptune(
        capsys, "search", "profile.json", "--global-batch-size", "8", "--quiet"
    )  # fmt: skip
    assert (code, err) == (0, "")
    return load_plans("plans.json")


def test_places_outside_the_ranking_are_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_plans = len(plans_here(capsys).candidates)
    for command in ("show", "explain", "export"):
        code, _, err = pptune(capsys, command, "plans.json", "99")
        assert (code, err) == (2, f"error: there is no plan 99; the file lists 1 to {num_plans}\n")


def test_a_profile_that_has_changed_is_not_used_in_its_place(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans_here(capsys)
    text = (here / "profile.json").read_text().replace('"small"', '"another"')
    (here / "profile.json").write_text(text)
    for command in ("show", "explain"):
        code, _, err = pptune(capsys, command, "plans.json")
        assert code == 2
        assert "is gone or has changed since the search; give it with --profile" in err


def test_validate_imports_no_code_that_only_the_file_names(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "evil.py").write_text("open('ran', 'w').close()\n")
    plans_here(capsys)
    data = json.loads((here / "plans.json").read_text())
    data["model"]["entry"] = "evil:model"
    (here / "plans.json").write_text(json.dumps(data))
    code, _, err = pptune(capsys, "validate", "plans.json")
    assert code == 2
    assert "names; if you trust it, name it yourself: --model evil:model" in err
    code, _, err = pptune(capsys, "validate", "plans.json", "--model", "other:model")
    assert code == 2
    assert "--model is other:model, but the plans are for evil:model" in err
    for command in ("explain", "show", "export"):
        assert pptune(capsys, command, "plans.json")[0] == 0
    assert not (here / "ran").exists()


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_ends_with_an_example_that_parses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = pptune(capsys, command, "--help")
    assert code == 0
    assert len(out.splitlines()) <= 55
    text = " ".join(out.split())
    example = text[text.rindex("Example: pptune ") :]
    assert example.startswith(f"Example: pptune {command}")
    options = re.findall(r"--[a-z-]+", example)
    assert all(re.search(rf"{option}\b", text[: -len(example)]) for option in options)
    if command == "validate":
        assert "Files alone never run code" in text.replace("│ │ ", "")


def test_the_example_of_predict_gives_the_published_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """29.9: P=4, M=8, V=2, c=0.1 in the table of DESIGN's oracles, from several simulators."""
    code, out, _ = pptune(
        capsys, *NUMBERS, "--chunks", "2", "--microbatches", "8", "--format", "json"
    )
    assert code == 0
    assert json.loads(out)["estimate"]["step_time_s"] == pytest.approx(29.9)


# --- environments ---------------------------------------------------------------------------------

TORCH_FREE = (
    ("search", "profile.json", "--global-batch-size", "8"),
    ("predict", "profile.json", "--microbatches", "8"),
    ("explain", "plans.json"),
    ("show", "plans.json", "--html", "report.html", "--trace", "trace.json"),
    ("export", "plans.json", "-o", "out/"),
)


def stub_torch(folder: Path, text: str) -> str:
    (folder / "stub" / "torch").mkdir(parents=True)
    (folder / "stub" / "torch" / "__init__.py").write_text(text)
    return f"{folder / 'stub'}{os.pathsep}{ROOT}"


def test_five_commands_run_where_torch_cannot_be_imported_and_the_others_say_so(
    here: Path,
) -> None:
    path = stub_torch(here, "raise ImportError('libtorch.so is broken')\n")
    script = textwrap.dedent(
        f"""
        import sys
        from pptune.cli import main
        for line in {TORCH_FREE!r}:
            sys.argv = ["pptune", *line]
            try:
                main()
            except SystemExit as end:
                assert end.code == 0, (line, end.code)
        assert "torch" not in sys.modules
        sys.argv = ["pptune", "profile"]
        main()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=here, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "it cannot be imported (libtorch.so is broken); install it with: pip install" in last
    assert {"report.html", "trace.json", "out"} <= {each.name for each in here.iterdir()}


def test_an_old_torch_is_named_with_the_version_that_is_needed(here: Path) -> None:
    path = stub_torch(here, "__version__ = '2.5.1+cu121'\n")
    for line in (("profile",), ("doctor",)):
        code, _, err = finish(start(*line, cwd=here, variables={"PYTHONPATH": path}))
        assert code == 3
        assert err.splitlines()[-1] == (
            "error: this command needs torch 2.13 or newer, but 2.5.1+cu121 is installed; install "
            "it with: pip install 'torch>=2.13'"
        )
        assert "Traceback" not in err


def test_odd_environments_change_nothing_but_how_it_looks(here: Path) -> None:
    """No colour, a narrow terminal, an ASCII locale, no home."""
    line = ("search", "profile.json", "--global-batch-size", "8", "-o")
    runs = {
        "plain": start(*line, "a.json", cwd=here),
        "narrow": start(*line, "b.json", cwd=here, variables={"COLUMNS": "60", "NO_COLOR": "1"}),
        "ascii": start(
            *line, "c.json", cwd=here,
            variables={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "HOME": "", "PYTHONUTF8": "0"},
        ),
    }  # fmt: skip
    answers = {}
    for name, process in runs.items():
        code, out, err = finish(process)
        assert code == 0, (name, err)
        assert "Traceback" not in err
        assert "\x1b" not in out + err
        answers[name] = out
    assert answers["ascii"].isascii()
    assert max(map(len, answers["narrow"].splitlines())) <= 60
    plans = [load_plans(here / f"{name}.json").candidates for name in "abc"]
    assert all(each == plans[0] for each in plans)


READ_ONLY = """
    import errno, os, sys

    def refuse(event, arguments):
        if event == "open" and isinstance(arguments[0], str):
            _, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and not arguments[0].startswith("/dev/"):
                raise OSError(errno.EROFS, "Read-only file system", arguments[0])
        if event in ("os.mkdir", "os.rename"):
            raise OSError(errno.EROFS, "Read-only file system", arguments[0])

    sys.addaudithook(refuse)
    from pptune.cli import main
    main()
"""


def test_predict_writes_nothing_anywhere(here: Path) -> None:
    """Every file system is read-only, home and site-packages included."""

    def run(*line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(READ_ONLY), *line], cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nowhere"}, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip

    done = run(*NUMBERS, "--chunks", "2", "--microbatches", "8", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["estimate"]["step_time_s"] == pytest.approx(29.9)
    refused = run("search", "profile.json", "--global-batch-size", "8")
    assert refused.returncode == 2
    assert "Read-only file system" in refused.stderr


def test_sources_that_were_not_built_are_named_with_what_to_run(here: Path) -> None:
    script = textwrap.dedent(
        """
        import sys

        class NotBuilt:
            def find_spec(self, name, path=None, target=None):
                if name == "pptune.schedules.orders":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, NotBuilt())
        from pptune.cli import main
        main()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *NUMBERS, "--microbatches", "8"], cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == (
        "error: pptune.schedules.orders is not built; run `pip install -e .` in the folder with "
        "pptune's sources\n"
    )


def test_names_that_the_terminal_cannot_show_do_not_end_the_command(here: Path) -> None:
    text = (here / "profile.json").read_text().replace('"small"', '"modèle→"')
    (here / "profile.json").write_text(text)
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    line = ("search", "profile.json", "--global-batch-size", "8", "--format", "json")
    code, out, err = finish(start(*line, cwd=here, variables={"PYTHONIOENCODING": "utf-8"}))
    assert (code, json.loads(out)["model"]["name"]) == (0, "modèle→"), err
    process = subprocess.run(
        [sys.executable, "-m", "pptune", *line], cwd=here, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **ascii_only}, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.decode())["model"]["name"] == "modèle→"
    code, out, err = finish(start("export", "plans.json", cwd=here, variables=ascii_only))
    assert code == 0, err


def test_a_reader_that_has_gone_is_no_error(here: Path) -> None:
    """As `pptune ... | head -1` when head has seen enough."""
    process = start(*NUMBERS, "--microbatches", "8", "--timeline", cwd=here)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line(here: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pptune", *NUMBERS, "--microbatches", "8"], cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=full, stderr=subprocess.PIPE,
            text=True, check=False, timeout=120,
        )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == "error: cannot write the result: No space left on device\n"


def run_as_command(work: str) -> "subprocess.CompletedProcess[str]":
    """`work` in the place of a command."""
    script = "\n".join(
        ["import contextlib, ctypes, os, signal, time", "from pptune import cli", "def work():",
         textwrap.indent(textwrap.dedent(work), "    "), "cli._run = work", "cli.main()"]
    )  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "lost",
    [
        # Python drops what is raised there.
        "ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))()",
        # As an extension does with any error in a module that it can do without.
        "with contextlib.suppress(BaseException): os.kill(os.getpid(), signal.SIGTERM)",
    ],
)
def test_a_signal_whose_exception_is_lost_still_ends_the_command(lost: str) -> None:
    done = run_as_command(f"{lost}\ntime.sleep(100)")
    assert done.returncode == 143
    assert done.stderr == "stopped; what was measured has been saved\n"


def test_what_a_stopped_command_still_has_to_do_is_done_once_and_to_its_end() -> None:
    done = run_as_command(
        """
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            for _ in range(10):
                time.sleep(0.1)
            print("tidied", flush=True)
        """
    )
    assert (done.returncode, done.stdout) == (130, "tidied\n")
    assert done.stderr == "stopped; what was measured has been saved\n"


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sqlite:///study.db", "journal://study.log"])
def test_two_writers_of_one_study_lose_nothing(here: Path, storage: str) -> None:
    import optuna

    line = (
        "search", "profile.json", "--global-batch-size", "16", "--schedules", "1f1b,interleaved",
        "--storage", storage, "--study-name", "both", "--quiet", "-o",
    )  # fmt: skip
    for code, _, err in map(finish, [start(*line, f"{n}.json", cwd=here) for n in range(2)]):
        assert code == 0, err
    first, second = (load_plans(here / f"{n}.json") for n in range(2))
    assert first.candidates == second.candidates
    kept: Any = storage
    if storage.startswith("journal"):
        backend = optuna.storages.journal.JournalFileBackend("study.log")
        kept = optuna.storages.JournalStorage(backend)
    study = optuna.load_study(study_name="both", storage=kept)
    tried = {trial.user_attrs["plan"] for trial in study.trials}
    assert {row.plan.label for row in first.candidates} <= tried


def test_an_export_has_the_search_s_parallel_sizes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = msgspec.structs.replace(small_profile(), parallel=Parallel(tensor=2, data=2))
    save_profile(profile, here / "sharded.json")
    code, _, err = pptune(
        capsys, "search", "sharded.json", "--global-batch-size", "16", "--target", "megatron",
        "--tensor-parallel", "2", "--zero", "1", "-q", "-o", "plans.json",
    )  # fmt: skip
    assert code == 0, err
    code, out, err = pptune(capsys, "export", "plans.json")
    assert code == 0, err
    assert "--tensor-model-parallel-size 2" in out
    assert "--use-distributed-optimizer" in out


@pytest.mark.slow
def test_twenty_commands_at_once_all_answer_right(here: Path) -> None:
    processes = [
        start("search", "profile.json", "--global-batch-size", "16", "-o", "same.json", cwd=here)
        if number % 2
        else start(*NUMBERS, "--chunks", "2", "--microbatches", "8", "--format", "json", cwd=here)
        for number in range(20)
    ]
    runs = [finish(process) for process in processes]
    assert [code for code, _, _ in runs] == [0] * 20, [err for _, _, err in runs]
    for _, out, _ in runs[::2]:
        assert json.loads(out)["estimate"]["step_time_s"] == pytest.approx(29.9)
    assert len({out for _, out, _ in runs[1::2]}) == 1
    load_plans(here / "same.json")  # ten writers of one file: one of them won, whole
    assert not [each for each in here.iterdir() if each.name.startswith(".")]


def test_a_missing_extra_is_named_with_its_install_command() -> None:
    """A head size other than hidden / heads needs the layers of the transformers library."""
    script = textwrap.dedent(
        """
        import sys
        sys.modules["transformers"] = None
        from pptune.errors import UsageError
        from pptune.model import ModelSpec
        from pptune.runtime.models import layer_source
        spec = ModelSpec(
            name="wide", family="llama", num_layers=2, seq_len=8, hidden_size=32, num_heads=4,
            num_kv_heads=4, ffn_size=64, vocab_size=61,
            hf_config={"model_type": "llama", "head_dim": 16},
        )
        try:
            layer_source(spec)
        except UsageError as error:
            print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=120,
    )  # fmt: skip
    assert "pip install 'pptune[hf]'" in done.stdout


def test_a_validation_of_other_plans_is_not_resumed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans_here(capsys)
    save(sample_validation(), here / "validation.json")
    before = (here / "validation.json").read_bytes()
    code, _, err = pptune(capsys, "validate", "plans.json", "--resume", "--quiet")
    assert code == 2
    assert "--resume: the validation file belongs to other plans" in err
    assert (here / "validation.json").read_bytes() == before
