"""Settings are declared once; what looks like one and is none is reported with the nearest name."""

from __future__ import annotations

import os
import re
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditorch_common.settings import DITORCH, Registry
from op_tools.settings import SETTINGS

ROOT = Path(__file__).parents[3]
LETTERS = string.ascii_uppercase + string.digits + "_"
REGISTRIES = {"op_tools": SETTINGS, "ditorch": DITORCH}

# Adding, renaming or removing a setting changes what users rely on: do it here, too, and in the docs.
FROZEN = {
    "op_tools": """
        OP_TOOLS_CONSOLE OP_TOOLS_RESULTS_DIR OP_TOOLS_INCLUDE_CPU OP_TOOLS_MAX_RECORDS OP_TOOLS_NATIVE
        OP_OBSERVE_LIST OP_OBSERVE_DISABLE_LIST OP_TRACE_LIST OP_TRACE_DISABLE_LIST
        OP_CAPTURE_LIST OP_CAPTURE_DISABLE_LIST OP_CAPTURE_FORMAT OP_CAPTURE_MAX_GB OP_CAPTURE_QUEUE_MB
        OP_CAPTURE_WHEN_FULL OP_CAPTURE_WRITERS
        OP_TIME_MEASURE_LIST OP_TIME_MEASURE_DISABLE_LIST
        OP_OVERFLOW_CHECK_LIST OP_OVERFLOW_CHECK_DISABLE_LIST
        OP_AUTOCOMPARE_LIST OP_AUTOCOMPARE_DISABLE_LIST OP_AUTOCOMPARE_MODE OP_AUTOCOMPARE_BUDGET OP_AUTOCOMPARE_KNOWN
        OP_AUTOCOMPARE_REFERENCES OP_AUTOCOMPARE_COVERAGE
        OP_AUTOCOMPARE_FIRST_LOOK OP_AUTOCOMPARE_STANDARD OP_AUTOCOMPARE_PROCESSES OP_AUTOCOMPARE_THREADS
        OP_AUTOCOMPARE_QUEUE_BYTES OP_AUTOCOMPARE_MAX_BYTES OP_AUTOCOMPARE_MAX_SECONDS OP_AUTOCOMPARE_RANK_SECONDS
        AUTOCOMPARE_ERROR_TOLERANCE AUTOCOMPARE_ERROR_TOLERANCE_<DTYPE>
        <OP>_AUTOCOMPARE_ERROR_TOLERANCE <OP>_AUTOCOMPARE_ERROR_TOLERANCE_<DTYPE>
        OP_FALLBACK_LIST OP_FALLBACK_DISABLE_LIST
        OP_DTYPE_CAST_LIST OP_DTYPE_CAST_DISABLE_LIST OP_DTYPE_CAST_DICT <OP>_OP_DTYPE_CAST_DICT
    """,
    "ditorch": """
        DITORCH_DEVICE DITORCH_DISABLE_MOCK DITORCH_SHOW_DEVICE_AS_CUDA DITORCH_REDUCE_FP32 DITORCH_QUIET
        DITORCH_SOFT_DEVICES DITORCH_SOFT_MEMORY_LIMIT DITORCH_SOFT_FAULTS DITORCH_SOFT_SHARED_RANDOM DITORCH_CACHE_DIR
        DITORCH_CONFORMANCE_DIARY DITORCH_CONFORMANCE_SELECTION
    """,
}
NAMES = [
    (package, name.replace("<OP>", op).replace("<DTYPE>", dtype))
    for package, names in FROZEN.items()
    for name in names.split()
    for op in (["LINEAR", "LAYER_NORM"] if "<OP>" in name else [""])
    for dtype in (["FLOAT16", "BFLOAT16", "FLOAT32", "FLOAT64"] if "<DTYPE>" in name else [""])
]


@pytest.mark.parametrize("package", FROZEN)
def test_the_surface_is_frozen(package: str) -> None:
    assert sorted(s.name for s in REGISTRIES[package]) == sorted(FROZEN[package].split())


def test_every_setting_is_documented_where_it_says() -> None:
    for registry in REGISTRIES.values():
        for setting in registry:
            assert setting.help
            text = (ROOT / setting.documented).read_text()
            named = re.search(rf"(?<![\w>]){setting.name}(?![\w<])", text)
            assert named, f"{setting.name} is not in {setting.documented}"


def test_every_variable_in_the_docs_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "ditorch/soft/README.md"]
    expression = r"(?:<OP>_|\b[A-Z]+_)?\b(?:OP_[A-Z]+_|DITORCH_|AUTOCOMPARE_)[A-Z0-9_]+(?:<DTYPE>)?"
    named = {(page.name, name) for page in pages for name in re.findall(expression, page.read_text())}
    assert len(named) > 50
    for page, name in named:
        plain = name.replace("<OP>", "LINEAR").replace("<DTYPE>", "FLOAT16").removesuffix("_")
        assert SETTINGS.find(plain) or DITORCH.find(plain), f"{page} names {name}, which does not exist"


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_declared_name_is_never_reported(package: str, name: str) -> None:
    assert REGISTRIES[package].find(name)
    assert not SETTINGS.misspelt([name])
    assert not DITORCH.misspelt([name])


@st.composite
def one_letter_edits(draw: st.DrawFn) -> tuple[Registry, str, str]:
    package, name = draw(st.sampled_from(NAMES))
    tail = len(name) - len(re.sub(r"^(LINEAR|LAYER_NORM)_", "", name))  # a mistake in the operator cannot be seen
    at = draw(st.integers(tail, len(name) - 1))
    letter = draw(st.sampled_from(LETTERS))
    edited = draw(
        st.sampled_from(
            [
                name[:at] + name[at + 1 :],
                name[:at] + letter + name[at + 1 :],
                name[: at + 1] + letter + name[at + 1 :],
                name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
            ]
        )
    )
    return REGISTRIES[package], name, edited


@given(one_letter_edits())
def test_a_misspelt_variable_is_reported_with_the_nearest_name(case: tuple[Registry, str, str]) -> None:
    registry, name, edited = case
    if registry.find(edited):
        assert not registry.misspelt([edited])
        return
    (line,) = registry.misspelt([edited, "PATH"])
    assert line.startswith(f"{edited} is not a setting of {registry.package}; did you mean ")
    suggested = line.split("did you mean ")[1].removesuffix("?").split(" or ")
    assert name in suggested


@pytest.mark.parametrize(
    "name",
    [
        *("OP_SERVICE_ACCOUNT_TOKEN", "OP_SESSION", "OP_ACCOUNT", "OP_CONNECT_HOST", "OP_CONNECT_TOKEN", "OP_DEVICE"),
        *("OP_BIOMETRIC_UNLOCK_ENABLED", "OP_CACHE", "OP_FORMAT", "OP_INCLUDE_ARCHIVE", "OP_RUN_NO_MASKING", "OP"),
        *("CAPTURE_LIST", "MY_OP_CAPTURE_LIST", "TORCH_DEVICE", "TORCH_QUIET", "DEVICE", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_variables_of_other_programs_are_left_alone(name: str) -> None:
    assert not SETTINGS.misspelt([name])
    assert not DITORCH.misspelt([name])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("OP_AUTOCOMPARE_BUGDET", "did you mean OP_AUTOCOMPARE_BUDGET?"),
        ("OP_AUTOCOMPARE_ERROR_TOLERANCE", "did you mean AUTOCOMPARE_ERROR_TOLERANCE?"),
        ("LINEAR_DTYPE_CAST_DICT", "did you mean LINEAR_OP_DTYPE_CAST_DICT?"),
        ("LINEAR_AUTOCOMPARE_ERROR_TOLERANCE_HALF", "`op_tools settings` lists them"),
        ("OP_OP_DTYPE_CAST_DICT", "did you mean OP_DTYPE_CAST_DICT?"),
        ("OP_CAPTURE_FOLDER", "`op_tools settings` lists them"),
    ],
)
def test_hints(name: str, hint: str) -> None:
    assert SETTINGS.misspelt([name]) == [f"{name} is not a setting of op_tools; {hint}"]


def test_duplicates_are_refused() -> None:
    registry = Registry("demo", ["DEMO_"])
    declare = registry.group("All", "README.md")
    declare("DEMO_SIZE", "number", 3, "how large")
    with pytest.raises(ValueError, match="DEMO_SIZE is declared twice"):
        declare("DEMO_SIZE", "flag", 0, "another")


def test_only_the_first_process_of_a_run_reports_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_SZIE", "1")
    registry = Registry("demo", ["DEMO_"])
    monkeypatch.setenv("RANK", "1")
    assert registry.new_mistakes() == []
    monkeypatch.setenv("RANK", "0")
    assert len(registry.new_mistakes()) == 1
    assert registry.new_mistakes() == []


def test_importing_the_base_imports_neither_package_nor_torch() -> None:
    code = "import sys, ditorch_common.settings, ditorch_common.toolchain; print({*sys.modules} & {*sys.argv[1:]})"
    command = [sys.executable, "-c", code, "torch", "ditorch", "op_tools", "numpy", "rich"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("quiet", ["0", "1"])
def test_import_ditorch_reports_a_misspelt_variable_once(quiet: str) -> None:
    environment = {**os.environ, "DITORCH_DEVICE": "cpu", "DITORCH_SOFT_DEVCIES": "3", "DITORCH_QUIET": quiet}
    code = "import ditorch; ditorch.deactivate(); ditorch.activate()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )
    line = "ditorch: DITORCH_SOFT_DEVCIES is not a setting of ditorch; did you mean DITORCH_SOFT_DEVICES?\n"
    assert done.stderr.count(line) == (quiet == "0")
