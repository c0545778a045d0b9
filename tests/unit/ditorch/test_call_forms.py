"""Every call form that CUDA documents, bound to each vendor's surface: mapped, adapted or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ditorch.backends.surfaces import recorded
from tests.unit.ditorch.cuda_forms import SETUP, forms
from tests.unit.ditorch.vendor_stubs import run, write_live, write_package

VENDORS = {
    "ascend": ("torch_npu", "npu"),
    "cambricon": ("torch_mlu", "mlu"),
    "musa": ("torch_musa", "musa"),
    "habana": ("habana_frameworks", "hpu"),
    "dipu": ("torch_dipu", "xpu"),
    "intel": ("", "xpu"),
    "mps": ("", "mps"),
}
QUICK = ("ascend", "mps")
CODE = """
import {early}
import ditorch
{setup}
failed = []
refused = 0
for form in {forms!r}:
    try:
        eval(form)
    except ditorch.UnsupportedError as error:
        assert "torch.cuda." in str(error) or "torch." in str(error), error
        refused += 1
    except Exception as error:
        if any(text in str(error) for text in ("has one device: cuda:1", "without MPS backend")):
            continue  # the device of that number, or the device itself, is not there
        failed.append(f"{{form}}: {{type(error).__name__}}: {{error}}")
print(ditorch.backend.name, refused)
assert not failed, "\\n" + "\\n".join(failed)
"""


def test_there_are_enough_forms() -> None:
    assert len(forms()) >= 300
    assert len({form.partition("(")[0] for form in forms()}) >= 90


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in VENDORS])
def test_every_form_is_mapped_adapted_or_refused_by_name(name: str, tmp_path: Path) -> None:
    package, device_type = VENDORS[name]
    if package:
        assert recorded(name) is not None
        write_package(tmp_path, package, device_type, name)
    else:
        write_live(tmp_path, device_type)
    code = CODE.format(early="torch" if package else f"stub_{device_type}", setup=SETUP, forms=forms())
    result = run(code, tmp_path, DITORCH_DEVICE=name)
    assert result.returncode == 0, result.stderr
    chosen, refused = result.stdout.split()
    assert chosen == name
    assert int(refused) < len(forms()) / 2
