"""losscmp tells noise from divergence, and reads what runs and logs leave."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.losscmp_rates import rate, two_devices, two_seeds
from op_tools import losscmp
from op_tools.losscmp import Curve, LosscmpError, compare, main, read_run

STEPS = np.arange(400)


def curve(name: str, seed: int, noise: float = 0.05, extra: np.ndarray | float = 0.0, ahead: float = 0.0) -> Curve:
    """A loss that falls like a real one, with noise from batch to batch."""
    falling = 1.5 + 4 * np.exp(-(STEPS + ahead) / 60)
    scatter = noise * np.random.default_rng(seed).standard_normal(len(STEPS))
    return Curve(name, STEPS, falling + scatter + extra, True)


def rounding(seed: int, size: float = 1e-4) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal(len(STEPS)) * STEPS / 400


def drift(start: int, size: float) -> np.ndarray:
    return np.where(start <= STEPS, size, 0.0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_two_seeds_are_noise(seed: int) -> None:
    verdict = compare(curve("a", seed), curve("b", seed + 1, ahead=4))
    assert verdict.kind == "noise"
    assert not verdict.paired


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.sampled_from([1e-7, 1e-5, 1e-3]))
def test_two_devices_differ_by_rounding(seed: int, size: float) -> None:
    verdict = compare(curve("a", seed), curve("b", seed, extra=rounding(seed + 1, size)))
    assert verdict.kind == "rounding"
    assert verdict.paired


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), start=st.integers(40, 300))
def test_a_small_drift_between_devices_is_found_where_it_begins(seed: int, start: int) -> None:
    # One per cent: a fifth of the noise from batch to batch, invisible without pairing.
    faulty = curve("b", seed, extra=rounding(seed + 1) + drift(start, 0.02))
    verdict = compare(curve("a", seed), faulty)
    assert verdict.kind == "diverges"
    assert verdict.step is not None
    assert abs(verdict.step - start) <= 20


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_large_drift_is_found_in_other_data_too(seed: int) -> None:
    verdict = compare(curve("a", seed), curve("b", seed + 1, extra=drift(200, 0.3)))
    assert verdict.kind == "diverges"
    assert verdict.step is not None
    assert abs(verdict.step - 200) <= 30


@pytest.mark.parametrize(("count", "share"), [(60, 0.0), (60, 0.5), (300, 0.0), (300, 0.5), (300, 0.8)])
def test_healthy_pairs_are_hardly_ever_said_to_be_apart(count: int, share: float) -> None:
    assert rate(two_seeds, 50, count, share) == 0
    assert rate(two_devices, 50, count, share, 3e-3) <= 0.06


@pytest.mark.parametrize("more", [{"shift": 3e-3}, {"rise": 5e-3}])
def test_small_faults_are_found_in_noise_that_remembers(more: dict[str, float]) -> None:
    assert rate(two_devices, 50, 300, 0.5, 1e-3, **more) >= 0.95


def test_more_noise_than_the_other_run_has_is_found() -> None:
    assert rate(two_seeds, 30, 1000, 0.0, wilder=2.0) >= 0.9
    verdict = compare(*two_seeds(np.random.default_rng(0), 1000, 0.0, wilder=3.0))
    assert verdict.kind == "scatters"
    assert "jump 2." in verdict.detail or "jump 3." in verdict.detail


def test_noise_beyond_rounding_needs_to_know_the_precision() -> None:
    a, b = curve("a", 0), curve("b", 0, extra=3e-4 * np.random.default_rng(1).standard_normal(400))
    assert compare(a, b).kind == "rounding"
    assert "--dtype tells" in compare(a, b).detail
    verdict = compare(a, b, dtype="float32")
    assert (verdict.kind, verdict.step) == ("coarse", 0)
    assert "rounding in float32 makes up to 1e-06" in verdict.detail
    assert compare(a, b, dtype="bfloat16").kind == "rounding"
    # what was lost in printing is nobody's fault
    c, d = (Curve(x.name, x.steps, np.array([float(f"{loss:.4g}") for loss in x.losses]), True) for x in (a, b))
    assert compare(c, d, dtype="float32").kind == "rounding"


def test_a_single_bad_step_is_no_divergence() -> None:
    bad = np.where(STEPS == 200, 3.0, 0.0)
    assert compare(curve("a", 0), curve("b", 0, extra=rounding(1) + bad)).kind == "rounding"


@pytest.mark.parametrize(
    ("config", "dtype"), [("amp: null", "float32"), ("amp: bfloat16", "bfloat16"), ("dtype: torch.float16", "float16")]
)
def test_the_configuration_beside_a_run_names_its_precision(tmp_path: Path, config: str, dtype: str) -> None:
    folder = write_run(tmp_path / "n1e5", curve("a", 0).losses)
    assert read_run(folder).dtype == ""
    (folder / "config.yaml").write_text(f"train:\n  output_dir: runs/n1e5\n  {config}\n")
    assert read_run(folder).dtype == dtype


def test_identical_and_not_finite() -> None:
    a = curve("a", 0)
    assert compare(a, a).kind == "identical"
    broken = a.losses.copy()
    broken[123] = np.nan
    verdict = compare(a, Curve("b", STEPS, broken, True))
    assert (verdict.kind, verdict.step) == ("diverges", 123)
    with pytest.raises(LosscmpError, match="0 iterations in common"):
        compare(a, Curve("b", STEPS + 1000, broken, True))


LOG = """[08/24 02:43:17 libai]: Rank of current process: 0. World size: 2
[08/24 02:43:44 lb.utils.events]:  eta: 0:26:36  iteration: 19/10000  consumed_samples: 160  total_loss: 9.68
[08/24 02:43:48 lb.utils.events]:  eta: 0:26:33  iteration: 39/10000  consumed_samples: 320  total_loss: 5.177
"""


def write_run(folder: Path, losses: np.ndarray) -> Path:
    folder.mkdir()
    with (folder / "metrics.json").open("w") as file:
        for i in range(19, len(losses), 20):
            chunk = losses[i - 19 : i + 1].tolist()
            file.write(json.dumps({"iteration": i, "total_loss": float(np.median(chunk)), "losses": chunk}) + "\n")
    return folder


def test_a_log_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").write_text(LOG)
    read = read_run(tmp_path / "log.txt")
    assert read.steps.tolist() == [19, 39]
    assert read.losses.tolist() == [9.68, 5.177]
    run = write_run(tmp_path / "run", np.linspace(9.7, 5, 40))
    assert main([str(tmp_path / "log.txt"), str(run)]) == 3
    shown = capsys.readouterr().out
    assert "9.68" in shown
    assert "5.177" in shown
    assert "(2 iterations" in shown


@pytest.mark.parametrize("points", [1, 2, 5, 11])
@pytest.mark.parametrize("level", [1.73, 10.0])
def test_few_points_are_an_answer_of_their_own(points: int, level: float) -> None:
    first, second = Curve("a", STEPS, np.ones(400), True), Curve("b", STEPS[:points], np.full(points, level), True)
    verdict = compare(first, second)
    assert (verdict.kind, verdict.points) == ("few", points)
    assert verdict.detail == "too few common points, at least 12 are needed"
    assert "at least 20 are" in compare(first, second, sigmas=7).detail
    close = Curve("b", second.steps, np.full(points, 1.0005), True)
    assert compare(first, close).kind == "noise"  # below the tolerance, a difference never counts


@pytest.mark.parametrize("points", range(12, 80))
def test_a_large_difference_is_never_taken_for_noise(points: int) -> None:
    noise = 0.01 * np.random.default_rng(points).standard_normal((2, points))
    first, second = (Curve("run", STEPS[:points], at + more, True) for at, more in zip((1, 1.73), noise))
    verdict = compare(first, second)
    # so few jumps may look as if noise remembered, by chance
    assert verdict.kind == "diverges" or (verdict.kind == "few" and 25 <= points < 40)


def test_the_exit_code_tells_too_few_points_from_agreement_and_divergence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.txt").write_text(LOG)
    (tmp_path / "log.txt").write_text(LOG.replace("9.68", "16.7").replace("5.177", "8.93"))
    runs = [str(tmp_path / "log.txt"), str(tmp_path / "few.txt")]
    assert main(runs) == 3
    shown = capsys.readouterr().out
    assert "few.txt CANNOT BE JUDGED against log.txt: too few common points, at least 12 are needed (2 iter" in shown
    (tmp_path / "broken.txt").write_text(LOG.replace("5.177", "nan"))
    assert main([*runs, str(tmp_path / "broken.txt")]) == 1
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "3 too few common points" in " ".join(capsys.readouterr().out.split())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = curve("a", 0), curve("b", 0, extra=rounding(1)), curve("c", 0, extra=drift(200, 0.1))
    runs = [str(write_run(tmp_path / x.name, x.losses)) for x in (a, b, c)]
    assert main(runs[:2]) == 0
    assert "b agrees to rounding with a" in capsys.readouterr().out
    assert main(runs) == 1
    assert "c DIVERGES from a at iteration " in capsys.readouterr().out
    runs[1] = str(write_run(tmp_path / "d", a.losses + 3e-4 * np.random.default_rng(1).standard_normal(400)))
    assert main(runs[:2]) == 0
    assert main([*runs[:2], "--dtype", "float32"]) == 1
    assert "d DIFFERS BEYOND ROUNDING from a at iteration 0: same data" in capsys.readouterr().out
    assert main(runs[:1]) == 2
    assert "give at least two" in capsys.readouterr().err
    assert main([*runs, "gone"]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "text").write_text("nothing of use")
    assert main([runs[0], str(tmp_path / "text")]) == 2
    assert "neither JSON records with a loss nor log lines" in capsys.readouterr().err


def test_it_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "curves.png"
    losscmp.draw([curve("a", 0), curve("b", 1)], image)
    assert image.read_bytes()[:4] == b"\x89PNG"
