"""Every vendor backend against a stand-in of its Python module: what is chosen, mapped and refused.

These run no device: they prove that ditorch calls the vendor's module with the vendor's devices. What
the vendor does then has been run for real on cuda, soft and cpu alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.ditorch.vendor_stubs import run, write_live, write_package

VENDORS = [
    ("ascend", "torch_npu", "npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
    ("cambricon", "torch_mlu", "mlu", "cncl", "MLU_VISIBLE_DEVICES"),
    ("musa", "torch_musa", "musa", "mccl", "MUSA_VISIBLE_DEVICES"),
    ("biren", "torch_br", "supa", "bccl", "SUPA_VISIBLE_DEVICES"),
    ("biren_supa", "torch_supa", "supa", "bccl", "SUPA_VISIBLE_DEVICES"),
    ("enflame", "torch_gcu", "gcu", "eccl", "TOPS_VISIBLE_DEVICES"),
    ("dipu", "torch_dipu", "xpu", "dicl", None),
    ("habana", "habana_frameworks", "hpu", "hccl", "HABANA_VISIBLE_MODULES"),
]
MAPPING = """
import torch, ditorch
name, package, kind, collective, variable = {vendor!r}
backend, module = ditorch.backend, ditorch.backend.module
assert (backend.name, backend.device_type, backend.collective) == (name, kind, collective), backend
assert ditorch.framework == f"{{package}}:9.8.7", ditorch.framework
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
module.calls.clear()

def last():
    called, given = module.calls[-1]
    return called, [value for value in given.values() if value not in (None, {{}})]

torch.cuda.set_device("cuda:1")
assert last() == ("set_device", [1 if kind == "hpu" else torch.device(kind, 1)]), last()
torch.cuda.synchronize(torch.device("cuda"))
assert ("synchronize", []) in [(n, []) for n, _ in module.calls]
if kind != "hpu":
    assert last() == ("synchronize", [torch.device(kind)]), last()
torch.cuda.memory_allocated(1)
assert last() == ("memory_allocated", [1]), last()
stream = torch.cuda.Stream(device="cuda:1", priority=-1)
assert last() == ("Stream", [torch.device(kind) if kind == "hpu" else torch.device(kind, 1), -1]), last()
assert stream.device == torch.device("cuda:0") and stream.cuda_stream == 7
assert torch.cuda.Event().cuda_event == 8
assert isinstance(stream, torch.cuda.Stream) and isinstance(stream, module.Stream)
assert isinstance(torch.cuda.Event(enable_timing=True), torch.cuda.Event)
torch.cuda.manual_seed_all(3)
assert ("manual_seed_all", {{"seed": 3}}) in module.calls
assert torch.cuda.get_device_capability() == ((9, 1) if name in ("ascend", "cambricon") else (8, 0))
properties = torch.cuda.get_device_properties("cuda:0")
seen = (properties.name, properties.total_memory, properties.major, properties.warp_size)
assert seen == ("stub", 2, torch.cuda.get_device_capability()[0], 32), seen

# A tensor asked for on cuda is asked of the vendor's device, which the stand-in cannot make.
try:
    torch.empty(2, device="cuda")
except Exception as error:
    assert "PrivateUse1" in str(error) or kind in str(error).lower(), error
else:
    raise AssertionError("the stand-in made a tensor")
assert torch.zeros(2).device.type == "cpu" and not torch.zeros(2).is_cuda
if kind not in ("xpu", "hpu"):
    assert torch.autocast("cuda", dtype=torch.bfloat16).device == kind

try:
    torch.cuda.power_draw()
except ditorch.UnsupportedError as error:
    assert "torch.cuda.power_draw" in str(error) and backend.vendor in str(error) and "Instead" in str(error)
else:
    raise AssertionError("power_draw should be refused")
if variable:
    assert module.visible.get(variable) == ("0,1" if name == "ascend" else "1,0"), module.visible
    assert any(p.what == "CUDA_VISIBLE_DEVICES" for p in ditorch.patches())
report = ditorch.doctor()
assert report.backend["name"] == name and report.devices[1]["name"] == "stub"
assert "torch.cuda.power_draw" in report.missing and str(report)
ditorch.deactivate()
assert not torch.cuda.is_available() and not ditorch.patches()
"""


QUICK = ("ascend", "habana")


@pytest.mark.parametrize(
    "vendor",
    [pytest.param(vendor, id=vendor[0], marks=() if vendor[0] in QUICK else pytest.mark.slow) for vendor in VENDORS],
)
def test_vendor_is_found_and_mapped(vendor: tuple[str, str, str, str, str], tmp_path: Path) -> None:
    write_package(tmp_path, vendor[1], vendor[2], vendor[0])
    result = run(MAPPING.format(vendor=vendor), tmp_path, CUDA_VISIBLE_DEVICES="1,0")
    assert result.returncode == 0, result.stderr


def test_intel_is_found_and_mapped(tmp_path: Path) -> None:
    write_live(tmp_path, "xpu")
    code = """
import torch, stub_xpu, ditorch
assert ditorch.backend.name == "intel" and ditorch.framework.startswith("torch:")
torch.cuda.set_device("cuda:1")
assert stub_xpu.module.calls[-1] == ("set_device", {"device": torch.device("xpu", 1)})
assert ditorch.backend.collective == "xccl"
"""
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_two_accelerators_are_an_error_that_lists_both(tmp_path: Path) -> None:
    write_package(tmp_path, "torch_npu", "npu", "ascend")
    write_live(tmp_path, "xpu")
    result = run("import torch, stub_xpu, ditorch", tmp_path)
    assert result.returncode != 0
    for word in ("more than one", "ascend, intel", "DITORCH_DEVICE", "torch_mlu is not installed"):
        assert word in result.stderr
    chosen = run("import torch, stub_xpu, ditorch; print(ditorch.backend.name)", tmp_path, DITORCH_DEVICE="npu")
    assert chosen.stdout.strip() == "ascend", chosen.stderr


def test_a_package_without_a_device_is_not_chosen_and_says_why(tmp_path: Path) -> None:
    write_package(tmp_path, "torch_mlu", "mlu")
    path = tmp_path / "torch_mlu" / "__init__.py"
    path.write_text(path.read_text() + "\ntorch.mlu.device_count = lambda: 0\n")
    result = run("import torch, ditorch", tmp_path, DITORCH_DEVICE="cambricon")
    assert result.returncode != 0
    assert "torch.mlu.device_count() is 0" in result.stderr


def test_a_package_that_fails_to_import_does_not_stop_the_others(tmp_path: Path) -> None:
    write_package(tmp_path, "torch_musa", "musa")
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise OSError('libascendcl.so: not found')")
    result = run("import torch, ditorch; print(ditorch.backend.name)", tmp_path)
    assert result.stdout.strip() == "musa", result.stderr
    named = run("import torch, ditorch", tmp_path, DITORCH_DEVICE="ascend")
    assert "import torch_npu failed: OSError: libascendcl.so: not found" in named.stderr


def test_disable_mock_loads_the_vendor_and_patches_nothing(tmp_path: Path) -> None:
    write_package(tmp_path, "torch_npu", "npu")
    code = """
import torch, ditorch
assert ditorch.backend.name == "ascend" and torch.npu.is_available()
assert ditorch.patches() == [] and not torch.cuda.is_available()
assert torch.zeros is torch._C._VariableFunctions.zeros
"""
    result = run(code, tmp_path, DITORCH_DISABLE_MOCK="1")
    assert result.returncode == 0, result.stderr


def test_third_parties_bring_backends_by_entry_point(tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(
        "from ditorch.backend import Backend\n"
        "BACKEND = Backend('acme', 'Acme', 'acme', package='torch_acme', collective='accl')\n"
    )
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ditorch.backends]\nacme = acme:BACKEND\n")
    write_package(tmp_path, "torch_acme", "acme")
    code = """
import torch, ditorch
assert ditorch.backend.name == "acme" and ditorch.framework == "torch_acme:9.8.7"
torch.cuda.set_device("cuda:1")
assert torch.acme.calls[-1] == ("set_device", {"device": torch.device("acme", 1)})
"""
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_unknown_device_names_the_known_ones() -> None:
    result = run("import torch, ditorch", DITORCH_DEVICE="gpu9000")
    assert "DITORCH_DEVICE=gpu9000: no such backend" in result.stderr
    assert "ascend" in result.stderr


def test_a_setting_that_is_not_a_switch_is_an_error() -> None:
    result = run("import torch, ditorch", DITORCH_DEVICE="cpu", DITORCH_SHOW_DEVICE_AS_CUDA="maybe")
    assert "DITORCH_SHOW_DEVICE_AS_CUDA='maybe': expected 0 or 1" in result.stderr
